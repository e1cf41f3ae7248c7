/** Batch: the waterfall of one message with many calls, and the same numbers as a table. */

import { document_of, save } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { changed, go } from "../route.js";
import { signal } from "../store.js";
import { bytes, duration, short, time } from "../text.js";
import { loaded, named, outcome, tell } from "../ui.js";
import { PHASES } from "./call.js";
import { start, waterfall } from "./waterfall.js";

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const path = `/batches/${encodeURIComponent(route.name)}.json`;
  const found = document_of(() => path);
  const width = signal(900);
  const query = signal(route.query);
  const from = signal(0);
  let timer = 0;

  async function read() {
    await found.reload();
    // Entries that still run appear when they end.
    if (found.data.value?.whole === false) timer = setTimeout(read, 1000);
  }
  void read();
  const measure = new ResizeObserver((entries) => (width.value = Math.round(entries[0].contentRect.width)));
  requestAnimationFrame(() => watch());
  function watch() {
    const place = document.getElementById("main");
    if (place) measure.observe(place);
  }

  const isTable = () => query.value.get("view") === "table";
  const toggle = () => go(changed({ view: isTable() ? null : "table" }), { replace: true });
  const onlyFailed = () => go(changed({ only: query.value.get("only") ? null : "failed" }), { replace: true });

  async function exported() {
    try {
      await save(path, `batch-${route.name}.json`);
      tell("The batch is saved.");
    } catch (error) {
      tell(String(/** @type {Error} */ (error).message));
    }
  }

  /** @param {any} data */
  function page(data) {
    const isFailed = query.value.get("only") === "failed";
    const all = data.entries;
    const entries = isFailed ? all.filter((/** @type {any} */ each) => each.row && each.row.outcome !== "ok") : all;
    const failed = all.filter((/** @type {any} */ each) => each.row && each.row.outcome !== "ok").length;
    return html`
      <p class="crumbs"><a href="/calls">Calls</a></p>
      <div class="head"><h1 tabindex="-1">Batch ${route.name.split("-").pop()}</h1>
        <span class="muted">array of ${data.size} in ${duration(data.ms)}${shares(data.upstreams ?? {})}</span></div>
      <p class="facts"><span>${time(data.at, true)}</span><span>${bytes(data.bytes)}</span>
        <span>${data.caller ? short(data.caller, 40) : "anonymous"}</span>
        <span>at most ${data.concurrency} at once</span>
        ${failed ? html`<span class="mark bad">✗ ${failed} failed</span>` : html`<span class="mark good">✓ all answered</span>`}
        ${data.whole ? nothing : html`<span class="mark warn">! ${data.missing} entries still run, or are not kept</span>`}</p>
      <div class="actions">
        <button type="button" aria-pressed=${String(!isTable())} @click=${() => isTable() && toggle()}>Waterfall</button>
        <button type="button" aria-pressed=${String(isTable())} @click=${() => isTable() || toggle()}>Table</button>
        <button type="button" aria-pressed=${String(isFailed)} @click=${onlyFailed}>Only failed</button>
        <button type="button" @click=${exported}>Export as JSON</button>
      </div>
      ${isTable() ? table(entries) : waterfall(data, entries, width.value, from)}
    `;
  }

  return {
    title: "Batch",
    json: () => path,
    keys: { w: toggle, Escape: () => go("/calls") },
    update: (next) => {
      query.value = next.query;
      return true;
    },
    close: () => {
      measure.disconnect();
      clearTimeout(timer);
    },
    view: () => loaded(found, page),
  };
}

/** How many entries went to which upstream. @param {Record<string, number>} upstreams */
function shares(upstreams) {
  const found = Object.entries(upstreams);
  if (!found.length) return "";
  const names = found.map(([name]) => name).join(", ");
  return `: ${found.map(([, number]) => number).join(" + ")} to ${names}`;
}

/** @param {any[]} entries */
function table(entries) {
  const names = Object.keys(PHASES);
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Entries"><table class="rows twin">
    <caption class="quiet">Entries of the batch, in the order of the message</caption>
    <thead><tr><th scope="col">#</th><th scope="col">Call</th><th scope="col">Outcome</th><th scope="col" class="w1">Id</th>
      <th scope="col" class="right">Start</th>
      ${names.map((name) => html`<th scope="col" class="right" title=${PHASES[name]}>${name}</th>`)}
      <th scope="col" class="right">Total</th><th scope="col">Refers to</th></tr></thead>
    <tbody>${entries.map((each) => html`<tr data-position=${each.position}>
      <td>${each.position + 1}</td>
      <td class="name">${each.row ? html`<a href=${`/calls/${encodeURIComponent(each.row.id)}`}>${named(each.row)}</a>` : html`<span class="muted">still runs, or is not kept</span>`}
        ${each.critical ? html`<span class="mark warn">critical</span>` : nothing}</td>
      <td>${each.row ? outcome(each.row) : nothing}</td>
      <td class="name w1">${each.row ? short(each.row.rpc_id ?? "no answer expected", 24) : nothing}</td>
      <td class="right">${duration(start(each))}</td>
      ${names.map((name) => html`<td class="right">${duration(part(each, name)?.ms)}</td>`)}
      <td class="right">${duration(each.row?.ms)}</td>
      <td>${each.refs?.map((/** @type {number} */ at) => `#${at + 1}`).join(" ") || "–"}</td>
    </tr>`)}</tbody></table></div>`;
}

/**
 * @param {any} entry
 * @param {string} name
 */
function part(entry, name) {
  return entry.phases?.find((/** @type {any} */ each) => each.name === name);
}
