/** Record: one command, the path of its states, and the dialog that settles an unknown outcome. */

import { document_of, post } from "../api.js";
import { html, nothing, svg } from "../lit-html.js";
import { role } from "../session.js";
import { signal } from "../store.js";
import { age, bytes, duration, short, time, visible } from "../text.js";
import { copy, loaded, mark, outcome, payload, tell } from "../ui.js";

/** The states and where they are drawn. */
const PLACES = /** @type {Record<string, [number, number]>} */ ({
  absent: [10, 60],
  running: [190, 60],
  waiting: [190, 150],
  done: [400, 20],
  unknown: [400, 110],
  tombstone: [600, 20],
});
/** From, to, and the word on the edge. @type {[string, string, string][]} */
const EDGES = [
  ["absent", "running", "claim"],
  ["running", "done", "complete"],
  ["running", "unknown", "lost"],
  ["running", "waiting", "asks"],
  ["waiting", "running", ""],
  ["unknown", "done", "it happened"],
  ["unknown", "absent", "it did not happen"],
  ["done", "tombstone", "retention"],
];

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const path = `/ledger/${encodeURIComponent(route.name)}.json`;
  const found = document_of(() => path);
  const isOpen = signal(false);
  const problem = signal("");
  const verdict = signal("");
  const isBusy = signal(false);
  void found.reload();
  const timer = setInterval(() => document.hidden || isOpen.value || found.reload(), 2000);

  function show() {
    problem.value = "";
    verdict.value = "";
    isOpen.value = true;
    requestAnimationFrame(() => {
      const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("resolve"));
      dialog.addEventListener("close", () => (isOpen.value = false), { once: true });
      dialog.showModal();
    });
  }

  /** @param {SubmitEvent} event */
  async function send(event) {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    const data = found.data.value;
    const body = /** @type {Record<string, unknown>} */ ({
      fence: data.fence,
      state: data.now ?? data.state,
      verdict: verdict.value,
      reason: String(form.get("reason")).trim(),
      tail: String(form.get("tail")),
    });
    if (verdict.value === "happened" && String(form.get("result") ?? "").trim()) body.result = form.get("result");
    isBusy.value = true;
    try {
      const answer = await post(path.replace(/\.json$/, "/resolve"), body);
      close();
      tell(answer.state === "absent" ? "Released: the next call runs." : `Recorded: ${answer.state}.`);
      found.data.value = answer.record ?? { ...data, now: answer.state, state: answer.state, can_resolve: false, why_not: "The record was released." };
    } catch (error) {
      const failure = /** @type {import("../api.js").ApiError} */ (error);
      const hint = failure.document?.error?.hint;
      problem.value = hint ? `${failure.message} ${hint}` : failure.message;
      if (failure.status === 409) {
        if (failure.document.record) found.data.value = failure.document.record;
        else void found.reload();
      }
    } finally {
      isBusy.value = false;
    }
  }

  function close() {
    /** @type {HTMLDialogElement | null} */ (document.getElementById("resolve"))?.close();
  }

  /** @param {any} data */
  function dialog(data) {
    const tail = String(data.key).slice(-6);
    const isStale = !data.can_resolve;
    return html`<dialog id="resolve" aria-labelledby="resolve-title">
      <form @submit=${send}>
        <h2 id="resolve-title">Did ${short(data.method, 40)} take effect?</h2>
        <p>Nothing here is run again. Your answer is recorded, with your name and the reason.</p>
        ${problem.value ? html`<p class="alert" role="alert">${visible(problem.value)}</p>` : nothing}
        ${isStale ? html`<p>The record is ${mark(data.now ?? data.state)} now. Nothing was changed by this dialog.</p>` : nothing}
        <fieldset><legend>Answer</legend>
          ${choice("happened", "It happened", data.after?.happened, verdict)}
          ${choice("not_happened", "It did not happen", data.after?.not_happened, verdict)}
          ${choice("leave", "Leave it", data.after?.leave, verdict)}
        </fieldset>
        ${verdict.value === "happened" ? html`<div class="field"><label for="result">Result that retries get, as JSON</label>
          <textarea id="result" name="result" spellcheck="false" placeholder="null"></textarea>
          ${data.returns ? html`<small>It must fit: <code>${short(JSON.stringify(data.returns), 300)}</code></small>` : nothing}</div>` : nothing}
        <div class="field"><label for="reason">Reason</label>
          <textarea id="reason" class="prose" name="reason" required minlength="10" maxlength="500" placeholder="How do you know? 10 to 500 characters"></textarea></div>
        <div class="field"><label for="tail">The last ${tail.length} characters of the key</label>
          <input id="tail" name="tail" required autocomplete="off" spellcheck="false" maxlength="6">
          <small>The key: <code>${visible(data.key)}</code></small></div>
        <p class="actions"><button type="submit" class="primary" ?disabled=${!verdict.value || isBusy.value || isStale}>Record the answer</button>
          <button type="button" @click=${close}>Cancel</button></p>
      </form></dialog>`;
  }

  /** @param {any} data */
  function page(data) {
    const state = data.now ?? data.state;
    return html`
      <p class="crumbs"><a href="/ledger">Ledger</a> · <a href=${`/ledger?state=${state}`}>${state}</a></p>
      <div class="head"><h1 tabindex="-1">${short(data.method)} <span class="muted name">${short(data.key, 60)}</span></h1>${mark(state)}</div>
      <div class="actions">
        ${data.can_resolve && role.value === "act" ? html`<button type="button" class="danger" @click=${show}>Resolve…</button>` : nothing}
        <button type="button" @click=${() => copy(data.key, "Key copied")}>Copy the key</button>
        ${data.why_not ? html`<span class="muted">${visible(data.why_not)}</span>` : nothing}
      </div>
      <section><h2>Path</h2>${drawing(data)}
        ${state === "unknown" ? html`<p><strong>Nothing says whether it took effect.</strong> Look where the effect would be, then resolve it.
          Until then a retry gets the error that its outcome is unknown, and nothing runs.</p>` : nothing}</section>
      <section><h2>Facts</h2>${facts(data)}</section>
      <section><h2>Content</h2>
        ${payload(data.params, "Params")}
        ${data.answer ? html`${payload(data.answer.text, data.answer.kind === "error" ? "Stored error" : "Stored result")}
          <p class="muted">${bytes(data.answer.bytes)} · digest <span class="name">${data.answer.digest}</span></p>` : html`<p class="muted">There is no stored answer.</p>`}
      </section>
      <section><h2>Calls</h2>${calls(data.calls ?? [])}${data.conflict ? conflict(data.conflict) : nothing}</section>
      <section><h2>Audit</h2>${lines(data.audit ?? [])}</section>
      ${isOpen.value ? dialog(data) : nothing}
    `;
  }

  return {
    title: "Record",
    json: () => path,
    keys: { y: () => void copy(found.data.value?.key ?? "", "Key copied") },
    close: () => clearInterval(timer),
    view: () => loaded(found, page),
  };
}

/**
 * @param {string} value
 * @param {string} word
 * @param {string | undefined} after
 * @param {{value: string}} verdict
 */
function choice(value, word, after, verdict) {
  return html`<label class="choice"><input type="radio" name="verdict" value=${value} required
    .checked=${verdict.value === value} @change=${() => (verdict.value = value)}>
    <span><strong>${word}</strong><br><span class="muted">${visible(after ?? "")}</span></span></label>`;
}

/** @param {any} data */
function committed(data) {
  if (!data.committed) return "no: it has done nothing";
  return ["running", "unknown"].includes(data.now ?? data.state) ? "yes: it may have taken effect" : "yes";
}

/** @param {any} data */
function facts(data) {
  return html`<dl>
    <dt>Caller</dt><dd class="name">${data.caller ? visible(data.caller) : "anonymous"}</dd>
    <dt>Method</dt><dd class="name">${visible(data.method)}</dd>
    <dt>Key</dt><dd class="name">${visible(data.key)}</dd>
    <dt>Attempts</dt><dd>${data.attempts}</dd>
    <dt>Committed</dt><dd>${committed(data)}</dd>
    <dt>Began</dt><dd>${time(data.started_at, true)}</dd>
    <dt>Ended</dt><dd>${time(data.completed_at, true)}</dd>
    <dt>Lease</dt><dd>${data.lease_left_s > 0 ? `${age(data.lease_left_s)} more` : "over"}</dd>
    <dt>Fence</dt><dd>${data.fence}</dd>
    <dt>Answer</dt><dd>${data.delivery ?? "not tracked: the call has a key"}</dd>
    ${data.resolved_by ? html`<dt>Resolved by</dt><dd>${visible(data.resolved_by)}</dd>` : nothing}
    <dt>Arguments</dt><dd class="name">${data.fingerprint}</dd>
  </dl>`;
}

/** The state machine, with the path of this record; as words where it would be too small. @param {any} data */
function drawing(data) {
  const path = /** @type {string[]} */ (data.path ?? []);
  const state = data.now ?? data.state;
  const steps = new Set(path.slice(1).map((each, index) => `${path[index]}>${each}`));
  return html`<svg class="states" viewBox="0 0 740 216" role="img" aria-label=${`States of the record: ${path.join(", then ")}. It is ${state} now.`}>
    ${svg`<defs>
      <marker id="state-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z"></path></marker>
      <marker id="state-tip-been" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="12" markerHeight="12" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z"></path></marker>
    </defs>
    ${EDGES.map(([from, to, word]) => edge(from, to, word, steps.has(`${from}>${to}`)))}
    ${Object.entries(PLACES).map(([name, [x, y]]) => {
      const classes = name === state ? `now ${name}` : path.includes(name) ? "been" : "";
      return svg`<g class=${classes} data-state=${name}><rect x=${x} y=${y} width="120" height="36" rx="8"></rect>
        <text x=${x + 60} y=${y + 23} text-anchor="middle">${name}</text></g>`;
    })}`}
  </svg>
  <p class="steps">${path.map((each, index) => html`${index ? " → " : nothing}${mark(each)}`)}</p>`;
}

/**
 * @param {string} from
 * @param {string} to
 * @param {string} word
 * @param {boolean} isBeen
 */
function edge(from, to, word, isBeen) {
  const tip = isBeen ? "url(#state-tip-been)" : "url(#state-tip)";
  if (to === "absent") return released(word);
  const [x1, y1] = PLACES[from];
  const [x2, y2] = PLACES[to];
  const isDown = x1 === x2;
  const side = y2 > y1 ? -14 : 14;
  const begin = isDown ? [x1 + 60 + side, y2 > y1 ? y1 + 36 : y1] : [x1 + 120, y1 + 18];
  const finish = isDown ? [x2 + 60 + side, y2 > y1 ? y2 : y2 + 36] : [x2, y2 + 18];
  if (from === "unknown" && to === "done") {
    begin.splice(0, 2, x1 + 60, y1);
    finish.splice(0, 2, x2 + 60, y2 + 36);
  }
  const middle = [(begin[0] + finish[0]) / 2, (begin[1] + finish[1]) / 2 - (begin[1] === finish[1] ? 6 : 12)];
  return svg`<path class=${isBeen ? "been" : ""} marker-end=${tip} d=${`M${begin.join(" ")}L${finish.join(" ")}`}></path>
    <text class="small" x=${middle[0]} y=${middle[1]} text-anchor=${isDown || from === "unknown" ? "end" : "middle"} dx=${isDown || from === "unknown" ? -6 : 0}>${word}</text>`;
}

/** Below the other states, back to the first one. No record is left that had this path. @param {string} word */
function released(word) {
  return svg`<path marker-end="url(#state-tip)" d="M460 146V206H70V96"></path>
    <text class="small" x="400" y="200" text-anchor="middle">${word}</text>`;
}

/** @param {any[]} rows */
function calls(rows) {
  if (!rows.length) return html`<p class="muted">No call with this key is among the kept rows.</p>`;
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Calls with this key"><table class="rows"><caption class="quiet">Calls with this key</caption>
    <thead><tr><th scope="col">Time</th><th scope="col">Outcome</th><th scope="col">Call</th><th scope="col" class="right">Duration</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr class=${row.gone ? "gone" : ""}><td>${time(row.at)}</td><td>${outcome(row)}</td>
      <td><a href=${`/calls/${encodeURIComponent(row.id)}`}>${row.id}</a></td><td class="right">${duration(row.ms)}</td></tr>`)}</tbody></table></div>`;
}

/** A call with the same key and other params. @param {any} data */
function conflict(data) {
  const link = html`<a href=${`/calls/${encodeURIComponent(data.call)}`}>${data.call}</a>`;
  if (!data.differs.length) return html`<p>${link} has this key and other params. ${visible(data.why)}</p>`;
  return html`<p>${link} has this key and other params. These members differ: <span class="name">${data.differs.map(visible).join(", ")}</span>.</p>`;
}

/** @param {any[]} found */
function lines(found) {
  if (!found.length) return html`<p class="muted">No line of the audit trail is about this record.</p>`;
  return html`<ul>${found.map((each) => html`<li>${time(each.time, true)} · ${each.outcome} ${each.reason ? `· ${visible(each.reason)}` : ""} · ${each.caller ? visible(each.caller) : "anonymous"}</li>`)}</ul>`;
}
