/** Calls: the list of calls as they come. */

import { document_of } from "../api.js";
import { add, arrived, follow, isGone, notice, numbers, rows, sampled } from "../feed.js";
import { FilterError, readFilter } from "../filter.js";
import { html, nothing } from "../lit-html.js";
import { changed, go } from "../route.js";
import { signal } from "../store.js";
import { bytes, duration, number, short, time } from "../text.js";
import { batchName, copy, mark, named, outcome, say } from "../ui.js";
import { noCalls } from "./nocalls.js";

/** Pixels of a row; `app.css` has the same number. */
const ROW = 26;
/** Rows that are drawn beyond the visible ones. */
const EXTRA = 6;
/** Rows that are drawn at most. */
const MOST_DRAWN = 56;

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const filter = signal(route.query.get("filter") ?? "");
  const typed = signal(filter.value);
  const problem = signal("");
  const isPaused = signal(false);
  const top = signal(0);
  const height = signal(600);
  const chosen = signal("");
  /** The rows while the list stands still, else null. */
  let frozen = /** @type {import("../feed.js").Row[] | null} */ (null);
  let arrivedBefore = 0;
  const history = document_of(() => `/calls.json?${new URLSearchParams({ filter: filter.value })}`);

  /** @param {string} text */
  function apply(text) {
    filter.value = text;
    typed.value = text;
    frozen = null;
    top.value = 0;
    problem.value = check(text);
    if (problem.value) return;
    follow(text);
    void load();
  }

  async function load() {
    const wanted = filter.value;
    await history.reload();
    if (wanted !== filter.value) return;
    if (history.data.value) add(history.data.value.rows);
    if (history.error.value) problem.value = history.error.value.message;
  }

  /** @param {string} text */
  function check(text) {
    try {
      readFilter(text);
      return "";
    } catch (error) {
      return error instanceof FilterError ? `${error.message} (character ${error.place + 1})` : String(error);
    }
  }

  function standing() {
    const isStill = isPaused.value || top.value > 0 || chosen.value !== "";
    if (!isStill) {
      frozen = null;
      arrivedBefore = arrived.value;
      return fitting(rows.value);
    }
    frozen ??= fitting(rows.value);
    return frozen;
  }

  /** @param {import("../feed.js").Row[]} all */
  function fitting(all) {
    if (typed.value === filter.value || check(typed.value)) return all;
    const fits = readFilter(typed.value);
    const now = Date.now() / 1000;
    return all.filter((row) => fits(row, now));
  }

  function release() {
    frozen = null;
    isPaused.value = false;
    chosen.value = "";
    top.value = 0;
    const list = document.querySelector(".scroll");
    if (list) list.scrollTop = 0;
    arrivedBefore = arrived.value;
  }

  /** @param {number} step */
  function move(step) {
    const all = standing();
    if (!all.length) return;
    const at = all.findIndex((row) => row.id === chosen.value);
    const next = Math.min(Math.max(at + step, 0), all.length - 1);
    frozen ??= all;
    chosen.value = all[next].id;
    const list = document.querySelector(".scroll");
    if (list) {
      const y = next * ROW;
      if (y < list.scrollTop) list.scrollTop = y;
      else if (y + 3 * ROW > list.scrollTop + list.clientHeight) {
        list.scrollTop = y + 3 * ROW - list.clientHeight;
      }
    }
    setTimeout(() => /** @type {HTMLElement | null} */ (document.querySelector("tr.chosen a"))?.focus(), 40);
  }

  function copyCall() {
    const row = standing().find((each) => each.id === chosen.value);
    if (row) void copyAs(row.id, "cli");
  }

  const keys = {
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    "/": () => /** @type {HTMLElement} */ (document.getElementById("filter")).focus(),
    p: () => (isPaused.value ? release() : (isPaused.value = true)),
    c: copyCall,
    Escape: release,
  };

  /** @param {Event} event */
  function submit(event) {
    event.preventDefault();
    go(changed({ filter: typed.value.trim() || null }));
  }

  /** @param {Event} event */
  function onScroll(event) {
    const list = /** @type {HTMLElement} */ (event.currentTarget);
    top.value = list.scrollTop;
    height.value = list.clientHeight;
  }

  function view() {
    const all = standing();
    const fresh = frozen ? arrived.value - arrivedBefore : 0;
    const document = history.data.value;
    const longest = Math.max(...all.slice(0, 200).map((row) => row.ms), 1);
    return html`
      <div class="head"><h1 tabindex="-1">Calls</h1>
        <form role="search" @submit=${submit}>
          <label class="quiet" for="filter">Filter</label>
          <input id="filter" type="search" spellcheck="false" autocomplete="off"
            placeholder="method:charge status:error duration:>500ms"
            aria-describedby="filter-problem" aria-invalid=${problem.value ? "true" : "false"}
            .value=${typed.value}
            @input=${(/** @type {any} */ event) => {
              typed.value = event.target.value;
              problem.value = check(typed.value);
              frozen = null;
            }}>
          <button type="submit">Filter</button>
          <button type="button" aria-pressed=${String(isPaused.value)} @click=${keys.p}>
            ${isPaused.value ? "Continue" : "Pause"}</button>
        </form>
      </div>
      <p id="filter-problem" class=${problem.value ? "problem" : "quiet"}>${problem.value}</p>
      <p class="facts">
        <span>${number(all.length)} rows</span>
        ${document?.hidden ? html`<span>${number(document.hidden)} hidden by the filter
          <a href=${changed({ filter: null })}>clear the filter</a></span>` : nothing}
        ${sampled.value > 1 ? html`<span class="mark warn">! sampled 1:${sampled.value}</span>` : nothing}
        ${notice.value ? html`<span class="mark warn">! ${notice.value}</span>` : nothing}
        ${fresh > 0 ? html`<button type="button" class="primary" @click=${release}>${number(fresh)} new</button>` : nothing}
      </p>
      ${all.length ? table(all, longest) : noCalls(document, filter.value)}
    `;
  }

  /**
   * @param {import("../feed.js").Row[]} all
   * @param {number} longest
   */
  function table(all, longest) {
    const count = Math.min(Math.ceil(height.value / ROW) + EXTRA, MOST_DRAWN);
    const first = Math.max(Math.min(Math.floor(top.value / ROW) - EXTRA / 2, all.length - count), 0);
    const drawn = all.slice(first, first + count);
    say(`${all.length} calls`);
    return html`<div class="scroll" tabindex="0" role="region" aria-label="Calls" @scroll=${onScroll}>
      <table class="rows calls" aria-rowcount=${all.length + 1}>
        <caption class="quiet">Calls, the newest first</caption>
        <thead><tr aria-rowindex="1">
          <th scope="col">Time</th><th scope="col">Outcome</th><th scope="col">Call</th>
          <th scope="col" class="w2">Kind</th><th scope="col" class="w3">Caller</th>
          <th scope="col" class="w2">Key</th><th scope="col" class="w3">Ran</th>
          <th scope="col" class="right">Duration</th><th scope="col" class="w1 bar-cell"><span class="quiet">Bar</span></th>
          <th scope="col" class="w2">Batch</th><th scope="col" class="w3 right">Bytes</th>
          <th scope="col" class="w4">Revision</th>${isGateway() ? html`<th scope="col" class="w3">Upstream</th>` : nothing}
          <th scope="col" class="w3">Worker</th>
        </tr></thead>
        <tbody>
          <tr class="space" aria-hidden="true"><td colspan="14" .style=${`height:${first * ROW}px`}></td></tr>
          ${drawn.map((row, index) => line(row, first + index, longest))}
          <tr class="space" aria-hidden="true"><td colspan="14"
            .style=${`height:${Math.max(all.length - first - drawn.length, 0) * ROW}px`}></td></tr>
        </tbody>
      </table></div>
      ${history.data.value?.more ? html`<p><button type="button" @click=${older}>Older calls</button></p>` : nothing}`;
  }

  async function older() {
    const before = history.data.value?.more;
    const query = new URLSearchParams({ filter: filter.value, before });
    const more = document_of(() => `/calls.json?${query}`);
    await more.reload();
    if (!more.data.value) return;
    frozen = null;
    add(more.data.value.rows);
    history.data.value = { ...history.data.value, more: more.data.value.more };
  }

  /**
   * @param {import("../feed.js").Row} row
   * @param {number} index
   * @param {number} longest
   */
  function line(row, index, longest) {
    const gone = isGone(row);
    const classes = [gone ? "gone" : "", row.id === chosen.value ? "chosen" : ""].join(" ").trim();
    return html`<tr class=${classes} aria-rowindex=${index + 2} data-worker=${row.worker}>
      <td>${time(row.at)}</td>
      <td>${outcome(row)}</td>
      <td class="name"><a href=${`/calls/${encodeURIComponent(row.id)}`}>${named(row)}</a></td>
      <td class="w2">${row.kind ?? "–"}</td>
      <td class="w3 name">${row.caller ? short(row.caller, 24) : html`<span class="muted">anonymous</span>`}</td>
      <td class="w2 name">${row.key ? html`${short(row.key, 28)}${row.attempt > 1 ? html` <span class="mark replay">↻ ${row.attempt}</span>` : nothing}` : html`<span class="muted">–</span>`}</td>
      <td class="w3">${row.ran === "yes" ? html`<span class="muted">yes</span>` : mark(row.ran)}</td>
      <td class="right">${duration(row.ms)}</td>
      <td class="w1 bar-cell"><svg viewBox="0 0 60 8" preserveAspectRatio="none" aria-hidden="true">
        <rect class=${row.replayed ? "replay" : row.outcome} width=${Math.max((row.ms / longest) * 60, 1)} height="8"></rect></svg></td>
      <td class="w2">${row.batch ? html`<a class="chip" href=${`/batches/${encodeURIComponent(row.batch)}`}>${batchName(row)}</a>` : nothing}</td>
      <td class="w3 right">${row.bytes ? bytes(row.bytes) : ""}</td>
      <td class="w4">${row.revision ?? html`<span class="muted">${row.transport === "rpc" ? "JSON-RPC" : "–"}</span>`}</td>
      ${isGateway() ? html`<td class="w3 name">${row.upstream ? short(row.upstream, 20) : "–"}</td>` : nothing}
      <td class="w3">${row.worker}${gone ? " (ended)" : ""}</td>
    </tr>`;
  }

  apply(filter.value);
  return {
    title: "Calls",
    view,
    keys,
    json: () => `/calls.json${filter.value ? `?${new URLSearchParams({ filter: filter.value })}` : ""}`,
    update: (next) => {
      apply(next.query.get("filter") ?? "");
      return true;
    },
  };
}

/** Whether the calls are passed on to other servers. */
function isGateway() {
  return numbers.value?.is_gateway === true;
}

/**
 * @param {string} id
 * @param {"cli" | "curl" | "python" | "json"} how
 */
async function copyAs(id, how) {
  const found = document_of(() => `/calls/${encodeURIComponent(id)}.json`);
  await found.reload();
  const text = found.data.value?.commands?.[how];
  if (text) await copy(text, "Copied as a command line");
}
