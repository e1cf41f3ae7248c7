/** Call: everything that is known about one call. */

import { document_of } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { go } from "../route.js";
import { bytes, duration, short, time, visible } from "../text.js";
import { batchName, copy, loaded, named, outcome, payload } from "../ui.js";

/** What each phase of a call is. */
export const PHASES = /** @type {Record<string, string>} */ ({
  waited: "waited for a place",
  claimed: "admitted, checked, key claimed",
  ran: "the function ran",
  encoded: "recorded and encoded",
  written: "waited for the rest of its message",
});

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const path = `/calls/${encodeURIComponent(route.name)}.json`;
  const found = document_of(() => path);
  void found.reload();

  /** @param {number} step */
  async function beside(step) {
    const data = found.data.value;
    if (!data?.batch) return;
    const batch = document_of(() => `/batches/${encodeURIComponent(data.batch)}.json`);
    await batch.reload();
    const entries = batch.data.value?.entries ?? [];
    const at = entries.findIndex((/** @type {any} */ each) => each.row?.id === data.row.id);
    const next = entries[at + step]?.row;
    if (next) go(`/calls/${encodeURIComponent(next.id)}`);
  }

  /** @param {string} how */
  function copyAs(how) {
    const text = found.data.value?.commands?.[how];
    if (text) void copy(text, `Copied as ${how}`);
  }

  function attempt() {
    const row = found.data.value?.row;
    if (row?.method && found.data.value.can_try) go(`/methods/${encodeURIComponent(row.tool ?? row.method)}/try?call=${row.id}`);
  }

  return {
    title: "Call",
    json: () => path,
    keys: {
      c: () => copyAs("cli"),
      C: () => copyAs("curl"),
      r: attempt,
      y: () => void copy(found.data.value?.row.key ?? "", "Key copied"),
      "[": () => void beside(-1),
      "]": () => void beside(1),
      Escape: () => go("/calls"),
    },
    view: () => loaded(found, (data) => page(data, { copyAs, attempt, beside })),
  };
}

/**
 * @param {any} data
 * @param {{copyAs: (how: string) => void, attempt: () => void, beside: (step: number) => Promise<void>}} act
 */
function page(data, act) {
  const row = data.row;
  const commands = Object.keys(data.commands ?? {}).filter((how) => data.commands[how]);
  return html`
    <p class="crumbs"><a href="/calls">Calls</a></p>
    <div class="head"><h1 tabindex="-1">${named(row)}</h1>${outcome(row)}
      ${row.gone ? html`<span class="mark muted">its worker has ended</span>` : nothing}</div>
    <div class="actions">
      ${commands.map((how) => html`<button type="button" @click=${() => act.copyAs(how)}>Copy as ${WORDS[how] ?? how}</button>`)}
      ${row.kind && data.can_try ? html`<button type="button" @click=${act.attempt}>Open in Try</button>` : nothing}
      ${data.batch ? html`<button type="button" @click=${() => act.beside(-1)}>Previous entry</button>
        <button type="button" @click=${() => act.beside(1)}>Next entry</button>` : nothing}
    </div>
    <section><h2>Summary</h2>${summary(data)}</section>
    ${data.passed ? html`<section><h2>Passed on</h2>${passed(data.passed)}</section>` : nothing}
    <section><h2>Phases</h2>${phases(data.phases, row.ms)}</section>
    <section><h2>Content</h2>${content(data)}</section>
    <section><h2>Log</h2>${log(data)}</section>
  `;
}

const WORDS = /** @type {Record<string, string>} */ ({ cli: "CLI", python: "Python", curl: "cURL", json: "JSON" });

/** @param {any} data */
function summary(data) {
  const row = data.row;
  return html`<dl>
    <dt>Began</dt><dd>${time(row.at, true)}</dd>
    <dt>Duration</dt><dd>${duration(row.ms)}</dd>
    <dt>Kind</dt><dd>${row.kind ?? "there is no such method"}</dd>
    <dt>Ran</dt><dd>${row.ran}${row.replayed ? html` · <span class="mark replay">↻ the answer is from the ledger</span>` : nothing}</dd>
    ${data.original ? html`<dt>First ran as</dt><dd><a href=${`/calls/${encodeURIComponent(data.original)}`}>${data.original}</a></dd>` : nothing}
    ${data.replays?.length ? html`<dt>Repeated by</dt><dd>${data.replays.map((/** @type {string} */ id) => html`<a href=${`/calls/${encodeURIComponent(id)}`}>${id}</a> `)}</dd>` : nothing}
    <dt>Caller</dt><dd class="name">${row.caller ? visible(row.caller) : "anonymous"}</dd>
    <dt>Id</dt><dd class="name">${row.rpc_id === null ? "a notification: it gets no answer" : visible(row.rpc_id)}</dd>
    <dt>Key</dt><dd class="name">${key(data)}</dd>
    ${data.batch ? html`<dt>Batch</dt><dd><a class="chip" href=${`/batches/${encodeURIComponent(data.batch)}`}>${batchName(row)}</a></dd>` : nothing}
    <dt>Message</dt><dd>${bytes(row.bytes)} over ${row.transport === "mcp" ? `MCP ${row.revision ?? ""}` : "JSON-RPC"}</dd>
    <dt>Worker</dt><dd>${row.worker}</dd>
    <dt>Call id</dt><dd class="name">${row.call_id ?? "–"}</dd>
    ${row.trace_id ? html`<dt>Trace</dt><dd class="name">${visible(row.trace_id)}</dd>` : nothing}
  </dl>`;
}

/** @param {any} data */
function key(data) {
  const row = data.row;
  if (!row.key) return row.kind === "command" ? "none" : "queries have none";
  const text = short(row.key, 120);
  if (!data.record) return text;
  return html`${text} · <a href=${`/ledger/${encodeURIComponent(data.record)}`}>its record</a>`;
}

/**
 * @param {any[]} list
 * @param {number} ms
 */
function phases(list, ms) {
  if (!list?.length) return html`<p class="muted">Only the whole duration is known: ${duration(ms)}.</p>`;
  const end = Math.max(...list.map((each) => each.start_ms + each.ms), 0.001);
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Phases"><table class="rows phases"><caption class="quiet">Phases of the call</caption>
    <thead><tr><th scope="col">Phase</th><th scope="col" class="right w1">Start</th><th scope="col" class="right">Duration</th>
      <th scope="col" class="wide"><span class="quiet">Bar</span></th></tr></thead>
    <tbody>${list.map((each) => html`<tr><td>${PHASES[each.name] ?? each.name}</td>
      <td class="right w1">${duration(each.start_ms)}</td><td class="right">${duration(each.ms)}</td>
      <td class="wide"><svg viewBox="0 0 300 10" preserveAspectRatio="none" aria-hidden="true">
        <rect class=${`phase ${each.name}`} x=${(each.start_ms / end) * 300} width=${Math.max((each.ms / end) * 300, 1)} height="10"></rect>
      </svg></td></tr>`)}</tbody></table></div>`;
}

/** What a gateway changed on the path to its upstream. @param {any} data */
function passed(data) {
  return html`<p>To <a href=${`/upstreams/${encodeURIComponent(data.upstream)}`}>${data.upstream}</a>${data.was_sent ? nothing : ": nothing was sent, the answer is from the ledger or a refusal"}.
      ${data.crosses ? "Client and upstream are of two eras: one has a handshake, the other has none." : nothing}</p>
    <div class="sideways" tabindex="0" role="region" aria-label="What was translated"><table class="rows passed"><caption class="quiet">What was translated</caption>
    <thead><tr><th scope="col">What</th><th scope="col">Client</th><th scope="col">Upstream</th><th scope="col">Changed</th></tr></thead>
    <tbody>${data.lines.map((/** @type {any} */ each) => html`<tr><td>${each.what}</td><td class="name">${visible(each.client ?? "not known")}</td>
      <td class="name">${visible(each.upstream ?? "not known")}</td><td>${each.is_changed ? "yes" : "no"}</td></tr>`)}</tbody></table></div>`;
}

/** @param {any} data */
function log(data) {
  if (!data.lines?.length) {
    return html`<p class="muted">No log record of this call is kept. Records that a function makes while it runs appear here, if its logger has their level.</p>`;
  }
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Log records"><table class="rows log"><caption class="quiet">Log records of the call</caption>
    <thead><tr><th scope="col">Time</th><th scope="col">Level</th><th scope="col" class="w2">Logger</th><th scope="col">Record</th></tr></thead>
    <tbody>${data.lines.map((/** @type {any} */ each) => html`<tr><td>${time(each.at)}</td>
      <td><span class="mark ${TONES[each.level] ?? "muted"}">${each.level}</span></td>
      <td class="w2 name">${short(each.logger, 40)}</td><td class="wrap">${visible(each.text)}</td></tr>`)}</tbody></table></div>`;
}

const TONES = /** @type {Record<string, string>} */ ({ WARNING: "warn", ERROR: "bad", CRITICAL: "bad" });

/** @param {any} data */
function content(data) {
  if (data.body) {
    return html`${payload(data.body.params, "Params")}${payload(data.body.result, "Answer")}
      ${data.body.cut ? html`<p class="muted">Cut when it was captured: 64 KB of each are kept.</p>` : nothing}`;
  }
  return html`<p class="muted">${data.capture === "bodies" ? "The content of this call is not kept any more." : html`Params and answers are not kept. Start the server with <code>--capture bodies</code> to keep the last ones in memory.`}</p>`;
}
