/**
 * The live feed: server-sent events by fetch, because EventSource cannot send the value of the tab.
 * It continues after a break where it stopped, and says how many rows were lost.
 */

import { forget, headers } from "./session.js";
import { signal } from "./store.js";

/** @typedef {Record<string, any>} Row */

/** Rows that a page keeps. */
const MOST = 5000;
/** Milliseconds before the first and the longest wait for another connection. */
const SOON = 500;
const LATE = 8000;

/** "connecting", "live", or "away". */
export const link = signal("connecting");
/** The newest first. */
export const rows = signal(/** @type {Row[]} */ ([]));
/** Tiles, workers and totals, once a second. */
export const numbers = signal(/** @type {any} */ (null));
/** A sentence about rows that are not here. */
export const notice = signal("");
/** Every Nth row is shown, if there are too many. */
export const sampled = signal(1);
/** Grows with every row that arrived. */
export const arrived = signal(0);

/** Workers that have ended since this page was opened. @type {Set<string>} */
const ended = new Set();

/** Whether the worker of a row has ended. @param {Row} row */
export function isGone(row) {
  return row.gone || ended.has(row.worker);
}

let filter = "";
let cursor = "";
let wait = SOON;
/** @type {AbortController | null} */
let open = null;
/** @type {Set<string>} */
let known = new Set();

/**
 * Follow the calls that fit a filter, from now on.
 * @param {string} wanted
 */
export function follow(wanted) {
  if (open && wanted === filter) return;
  filter = wanted;
  cursor = "";
  known = new Set();
  rows.value = [];
  notice.value = "";
  open?.abort();
  open = new AbortController();
  void run(open);
}

/** Follow all calls, unless some are followed: the list keeps its filter while one call is shown. */
export function stay() {
  if (!open) follow("");
}

/**
 * Add older rows, such as those of `calls.json`.
 * @param {Row[]} more
 */
export function add(more) {
  const fresh = more.filter((row) => !known.has(row.id));
  if (!fresh.length) return;
  for (const row of fresh) known.add(row.id);
  const all = [...fresh, ...rows.value].sort((one, other) => other.n - one.n);
  for (const row of all.splice(MOST)) known.delete(row.id);
  rows.value = all;
}

/** @param {AbortController} mine */
async function run(mine) {
  while (!mine.signal.aborted) {
    try {
      await read(mine);
    } catch {
      // The connection broke, or the server is not there.
    }
    if (mine.signal.aborted) return;
    link.value = "away";
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LATE);
  }
}

/** @param {AbortController} mine */
async function read(mine) {
  const query = new URLSearchParams({ filter });
  if (cursor) query.set("after", cursor);
  const answer = await fetch(`/feed?${query}`, { headers: headers(), signal: mine.signal });
  if (answer.status === 401) {
    mine.abort();
    open = null;
    forget("The session is over. A restarted server needs a new link.");
    return;
  }
  if (!answer.ok || !answer.body) throw new Error("refused");
  link.value = "live";
  wait = SOON;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) take(part);
  }
}

/** @param {string} text */
function take(text) {
  let name = "";
  let id = "";
  let data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("id: ")) id = line.slice(4);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (id) cursor = id;
  if (name === "rows") {
    const document = JSON.parse(data);
    sampled.value = document.sampled ?? 1;
    if (document.lost > 0) notice.value = `Lost ${document.lost} rows: more came than are kept.`;
    if (document.lost < 0) notice.value = "Reconnected. Earlier rows are not here.";
    add(document.rows);
    arrived.value += document.rows.length;
  } else if (name === "numbers") {
    const found = JSON.parse(data);
    for (const each of found.workers ?? []) if (each.gone) ended.add(each.worker);
    numbers.value = found;
  }
}
