/** The waterfall of a batch: one bar for each entry, in the order of the message. */

import { html, nothing, svg } from "../lit-html.js";
import { duration, short } from "../text.js";

/** Pixels. */
const ROW = 24;
const BAR = 12;
const TOP = 58;
/** Entries above which only some rows are drawn. */
const WINDOW = 200;

/** When the work on an entry began, in ms since the message was complete. @param {any} entry */
export function start(entry) {
  const first = entry.phases?.find((/** @type {any} */ each) => each.name !== "waited") ?? entry.phases?.[0];
  return first ? first.start_ms : null;
}

/** @param {any} entry */
function finish(entry) {
  const done = (entry.phases ?? []).filter((/** @type {any} */ each) => each.name !== "written");
  return Math.max(0, ...done.map((/** @type {any} */ each) => each.start_ms + each.ms));
}

/**
 * @param {any} data
 * @param {any[]} entries
 * @param {number} width
 * @param {{value: number}} from
 */
export function waterfall(data, entries, width, from) {
  const label = Math.min(Math.max(width * 0.28, 110), 260);
  const space = Math.max(width - label - 70, 80);
  const end = Math.max(data.ms, ...entries.map(finish), 0.001);
  /** @param {number} ms */
  const x = (ms) => label + (ms / end) * space;
  const isLong = entries.length > WINDOW;
  const first = isLong ? Math.min(from.value, entries.length - WINDOW) : 0;
  const drawn = isLong ? entries.slice(first, first + WINDOW) : entries;
  /** @type {Map<number, number>} */
  const lines = new Map(drawn.map((each, index) => [each.position, index]));
  const height = TOP + drawn.length * ROW + 8;
  const words = `Waterfall of ${entries.length} entries in ${duration(end)}. The table has the same numbers.`;
  return html`<figure class="waterfall">
    ${isLong ? html`<p class="actions">Rows ${first + 1} to ${first + drawn.length} of ${entries.length}
      <button type="button" @click=${() => (from.value = Math.max(first - WINDOW, 0))}>Earlier rows</button>
      <button type="button" @click=${() => (from.value = Math.min(first + WINDOW, entries.length - WINDOW))}>Later rows</button></p>` : nothing}
    <svg width=${width} height=${height} role="group" aria-label=${words}>
      <defs>
        <pattern id="dots" width="4" height="4" patternUnits="userSpaceOnUse"><circle cx="2" cy="2" r="1" class="ink"></circle></pattern>
        <pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="3" height="6" class="ink"></rect></pattern>
        <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"></path></marker>
      </defs>
      ${overview(data, entries, x, end)}
      ${ticks(end).map((ms) => svg`<line class="grid" x1=${x(ms)} x2=${x(ms)} y1=${TOP - 6} y2=${height}></line>
        <text class="axis" x=${x(ms)} y=${TOP - 10} text-anchor="middle">${duration(ms)}</text>`)}
      ${drawn.map((each) => arrows(each, lines, entries, x))}
      ${drawn.map((each, index) => bar(each, TOP + index * ROW, x, label, width))}
    </svg>
    <figcaption>${legend()}</figcaption>
  </figure>`;
}

/**
 * How many entries ran at each moment, and the cap as a line.
 * @param {any} data
 * @param {any[]} entries
 * @param {(ms: number) => number} x
 * @param {number} end
 */
function overview(data, entries, x, end) {
  /** @type {[number, number][]} */
  const changes = [];
  for (const each of entries) {
    const began = start(each);
    const ended = finish(each);
    if (began === null || !each.row || ended <= began) continue;
    changes.push([began, 1], [ended, -1]);
  }
  // An entry that begins when another one ends takes its place.
  changes.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  let running = 0;
  let most = 1;
  let path = `M${x(0)} 30`;
  const steps = changes.map(([ms, step]) => {
    running += step;
    most = Math.max(most, running);
    return /** @type {[number, number]} */ ([ms, running]);
  });
  const scale = 26 / Math.max(most, Math.min(data.concurrency, most * 2));
  for (const [ms, count] of steps) path += `H${x(ms).toFixed(1)}V${(30 - count * scale).toFixed(1)}`;
  path += `H${x(end)}V30z`;
  const isNear = data.concurrency <= most * 2;
  const cap = 30 - data.concurrency * scale;
  return svg`<text class="axis" x="0" y="18">at once: ${most} of ${data.concurrency}</text>
    <path class="overview" d=${path}></path>
    ${isNear ? svg`<line class="cap" x1=${x(0)} x2=${x(end)} y1=${cap} y2=${cap}></line>` : nothing}`;
}

/** @param {number} end */
function ticks(end) {
  const rough = end / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= rough) ?? rough;
  const made = [];
  for (let ms = 0; ms <= end * 1.0001; ms += step) made.push(ms);
  return made;
}

/**
 * @param {any} entry
 * @param {number} y
 * @param {(ms: number) => number} x
 * @param {number} label
 * @param {number} width
 */
function bar(entry, y, x, label, width) {
  const middle = y + ROW / 2;
  const row = entry.row;
  const number = svg`<text class="axis" x="0" y=${middle + 4}>${entry.position + 1}</text>`;
  if (!row) return svg`<g class="entry">${number}<text class="axis" x="28" y=${middle + 4}>still runs, or is not kept</text></g>`;
  const most = Math.max(Math.floor((label - 44) / 7), 8);
  const failed = row.outcome !== "ok";
  const sign = row.replayed ? "↻" : failed ? "✗" : "✓";
  const words = `${entry.position + 1}: ${row.tool ?? row.method}, ${row.replayed ? "replayed" : row.outcome}, ${duration(row.ms)}`;
  const parts = (entry.phases ?? []).filter((/** @type {any} */ each) => each.name !== "written");
  const last = finish(entry);
  const classes = `entry ${failed ? "failed" : ""} ${row.replayed ? "replayed" : ""} ${entry.critical ? "critical" : ""}`;
  return svg`<a href=${`/calls/${encodeURIComponent(row.id)}`} class=${classes} data-position=${entry.position}>
    <rect class="hit" x="0" y=${y} width=${width} height=${ROW}></rect>
    ${number}
    <text class="word" x="24" y=${middle + 4}><tspan class="sign">${sign}</tspan> ${short(row.tool ?? row.method, most)}</text>
    ${parts.map((/** @type {any} */ each) => segment(each, middle, x, row.replayed))}
    ${entry.critical ? svg`<line class="path" x1=${x(start(entry) ?? 0)} x2=${x(last)} y1=${middle + BAR / 2 + 2} y2=${middle + BAR / 2 + 2}></line>` : nothing}
    ${row.rpc_id === null ? svg`<path class="tick" d=${`M${x(last) + 2} ${middle - 6}v12`}></path>` : nothing}
    <text class="axis" x=${Math.min(x(last) + 6, width - 62)} y=${middle + 4}>${duration(row.ms)}</text>
    <title>${words}</title>
  </a>`;
}

/**
 * @param {any} phase
 * @param {number} middle
 * @param {(ms: number) => number} x
 * @param {boolean} isReplayed
 */
function segment(phase, middle, x, isReplayed) {
  const left = x(phase.start_ms);
  const wide = Math.max(x(phase.start_ms + phase.ms) - left, 1);
  const isThin = phase.name === "encoded";
  const tall = isThin ? BAR / 2 : BAR;
  const y = middle - tall / 2;
  const over = isReplayed ? "hatch" : phase.name === "claimed" ? "dots" : "";
  return svg`<rect class=${`phase ${phase.name}`} x=${left} y=${y} width=${wide} height=${tall}></rect>
    ${over ? svg`<rect class="pattern" fill=${`url(#${over})`} x=${left} y=${y} width=${wide} height=${tall}></rect>` : nothing}`;
}

/**
 * From the end of each entry that this one refers to, to its own start.
 * @param {any} entry
 * @param {Map<number, number>} lines
 * @param {any[]} entries
 * @param {(ms: number) => number} x
 */
function arrows(entry, lines, entries, x) {
  const line = lines.get(entry.position);
  if (line === undefined || !entry.refs?.length) return nothing;
  const y2 = TOP + line * ROW + ROW / 2;
  return entry.refs.map((/** @type {number} */ at) => {
    const from = lines.get(at);
    const other = entries.find((each) => each.position === at);
    if (from === undefined || !other) return nothing;
    const y1 = TOP + from * ROW + ROW / 2;
    const x1 = x(finish(other));
    const x2 = x(start(entry) ?? 0);
    // Down to the line of this entry, then along its wait; without a wait, onto its bar.
    const isClose = x2 - x1 < 10;
    const down = y2 > y1 ? 1 : -1;
    const path = isClose
      ? `M${x1} ${y1}V${y2 - down * (BAR / 2 + 8)}L${x2} ${y2 - down * (BAR / 2)}`
      : `M${x1} ${y1}V${y2 - down * 5}q0 ${down * 5} 5 ${down * 5}H${x2}`;
    return svg`<path class="arrow" data-from=${at} data-to=${entry.position} marker-end="url(#tip)" d=${path}></path>`;
  });
}

function legend() {
  /** @param {string} name @param {string} over */
  const box = (name, over = "") => html`<svg class=${over === "hatch" ? "replayed" : ""} width="22" height="12" aria-hidden="true">
    ${svg`<rect class=${`phase ${name}`} y="1" x="1" width="20" height="10"></rect>${over ? svg`<rect class="pattern" fill=${`url(#${over})`} y="1" x="1" width="20" height="10"></rect>` : nothing}`}</svg>`;
  return html`<span>${box("waited")} waited</span><span>${box("claimed", "dots")} key and checks</span>
    <span>${box("ran")} ran</span><span>${box("ran", "hatch")} replayed</span><span>${box("encoded")} recorded, encoded</span>
    <span><svg width="22" height="12" aria-hidden="true">${svg`<line class="path" x1="1" x2="21" y1="6" y2="6"></line>`}</svg> critical path</span>
    <span><svg width="22" height="12" aria-hidden="true">${svg`<path class="arrow" d="M1 6H20"></path>`}</svg> uses a result</span>
    <span>press <kbd>w</kbd> for the table</span>`;
}
