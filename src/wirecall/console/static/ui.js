/** Parts that several pages share. */

import { html, nothing, svg } from "./lit-html.js";
import { signal } from "./store.js";
import { MOST, short, visible } from "./text.js";

/** What the polite status line says, at most every five seconds. */
export const said = signal("");
let saidAt = 0;

/** @param {string} text */
export function say(text) {
  const now = Date.now();
  if (now - saidAt < 5000 && said.value) return;
  saidAt = now;
  said.value = text;
}

/** A short message at the edge, after an action of the person. */
export const toast = signal("");
let timer = 0;

/** @param {string} text */
export function tell(text) {
  toast.value = text;
  clearTimeout(timer);
  timer = setTimeout(() => (toast.value = ""), 4000);
}

/**
 * @param {string} text
 * @param {string} [what]
 */
export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
    tell(`${what}.`);
  } catch {
    tell("The browser does not allow to copy.");
  }
}

/** Signs beside the words: never colour alone. */
const SIGNS = /** @type {Record<string, [string, string]>} */ ({
  ok: ["✓", "good"],
  error: ["✗", "bad"],
  cancelled: ["–", "warn"],
  "input required": ["?", "warn"],
  undelivered: ["!", "warn"],
  replayed: ["↻", "replay"],
  running: ["►", "info"],
  waiting: ["…", "warn"],
  done: ["✓", "good"],
  unknown: ["?", "bad"],
  tombstone: ["†", "muted"],
  absent: ["○", "muted"],
  no: ["–", "muted"],
});

/**
 * A state as a sign and a word.
 * @param {string} word
 * @param {unknown} [more]
 */
export function mark(word, more = nothing) {
  const [sign, tone] = SIGNS[word] ?? ["·", "muted"];
  return html`<span class="mark ${tone}"><span aria-hidden="true">${sign}</span> ${word}${more}</span>`;
}

/** @param {Record<string, any>} row */
export function outcome(row) {
  if (row.replayed && row.outcome === "ok") return mark("replayed");
  const code = row.code === null || row.code === undefined ? nothing : html` ${row.code}`;
  return mark(row.outcome, code);
}

/** @param {Record<string, any>} row */
export function named(row) {
  if (row.tool) return html`<span class="muted prefix">tools/call</span> ${short(row.tool)}`;
  return short(row.method);
}

/** @param {Record<string, any>} row */
export function batchName(row) {
  const name = String(row.batch).split("-").pop();
  return `${name} ${row.position + 1}/${row.size}`;
}

/**
 * @param {string} title
 * @param {unknown} body
 */
export function empty(title, body) {
  return html`<div class="empty"><h2>${title}</h2>${body}</div>`;
}

/** @param {string} line */
export function command(line) {
  return html`<p class="command"><code>${line}</code>
    <button type="button" @click=${() => copy(line)}>Copy</button></p>`;
}

/**
 * What a page shows while its document is read, or cannot be.
 * @param {{data: {value: any}, error: {value: any}, reload: () => void}} source
 * @param {(data: any) => unknown} view
 */
export function loaded(source, view) {
  const error = source.error.value;
  const data = source.data.value;
  const bar = error
    ? html`<div class="alert" role="alert">
        <strong>${error.status === 404 ? "Not here" : "Cannot be read"}.</strong>
        ${visible(error.message)} ${visible(error.document?.error?.hint ?? "")}
        <button type="button" @click=${source.reload}>Try again</button>
      </div>`
    : nothing;
  if (!data) return error ? bar : html`<p class="muted">Reading…</p>`;
  return html`${bar}${view(data)}`;
}

/**
 * A value as text: hostile characters visible, long values cut.
 * @param {string | null | undefined} text
 * @param {string} label
 */
export function payload(text, label) {
  if (text === null || text === undefined) return html`<p class="muted">${label}: not kept.</p>`;
  const isLong = text.length > MOST;
  const shown = visible(isLong ? text.slice(0, MOST) : indented(text));
  return html`<div class="payload">
    <div class="bar"><h3>${label}</h3>
      <button type="button" @click=${() => copy(text)}>Copy</button></div>
    <pre tabindex="0" aria-label=${label}>${shown}</pre>
    ${isLong ? html`<p class="muted">Cut: ${MOST / 1024} of ${Math.ceil(text.length / 1024)} KB are shown.</p>` : nothing}
  </div>`;
}

/**
 * JSON with line breaks; its numbers and strings stay as they are. Other text stays as it is.
 * @param {string} text
 */
export function indented(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  let made = "";
  for (const [part] of text.matchAll(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s"{}[\],:]+/g)) {
    if (part === "{" || part === "[") made += part + "\n" + "  ".repeat(++depth);
    else if (part === "}" || part === "]") {
      depth = Math.max(depth - 1, 0);
      made = /[{[]\n\s*$/.test(made) ? made.trimEnd() + part : `${made}\n${"  ".repeat(depth)}${part}`;
    } else if (part === ",") made += ",\n" + "  ".repeat(depth);
    else if (part === ":") made += ": ";
    else made += part;
  }
  return made;
}

/** The signs of the annotations of tools, each drawn beside its word. */
const ICONS = /** @type {Record<string, string>} */ ({
  "read-only": "M1.5 8S4 3.5 8 3.5 14.5 8 14.5 8 12 12.5 8 12.5 1.5 8 1.5 8zM8 6a2 2 0 1 0 0 4 2 2 0 0 0 0-4",
  writes: "M2.5 13.5l.8-3.3 7.6-7.6 2.5 2.5-7.6 7.6zM9.5 4l2.5 2.5",
  destructive: "M8 2L14.5 13.5H1.5zM8 6.5v3.2M8 11.4v.8",
  repeatable: "M13 5.5A5.5 5.5 0 1 0 13.5 9M13.5 2.5v3.2h-3.2",
  "open-world": "M8 1.8a6.2 6.2 0 1 0 0 12.4A6.2 6.2 0 0 0 8 1.8zM2 8h12M8 2c2.4 2.6 2.4 9.4 0 12M8 2c-2.4 2.6-2.4 9.4 0 12",
  closed: "M4 7.5h8v6H4zM5.5 7.5V5a2.5 2.5 0 0 1 5 0v2.5",
  keyed: "M5.5 6.8a3 3 0 1 0 0 2.4h4v2h2v-2h2.5V6.8z",
});

/** @param {string} name */
export function icon(name) {
  return svg`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name] ?? ICONS.writes}></path></svg>`;
}

/**
 * A line of numbers as a small chart.
 * @param {number[]} values
 * @param {string} label
 */
export function spark(values, label) {
  const most = Math.max(...values, 0);
  const points = values.map((value, index) => {
    const x = (index / Math.max(values.length - 1, 1)) * 120;
    const y = 26 - (most ? (value / most) * 24 : 0);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  return html`<svg class="spark" viewBox="0 0 120 28" preserveAspectRatio="none" role="img" aria-label=${label}>
    ${svg`<polygon points=${`0,28 ${points.join(" ")} 120,28`}></polygon><polyline points=${points.join(" ")}></polyline>`}
  </svg>`;
}
