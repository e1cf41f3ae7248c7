/** Ledger: the records of commands, by state. */

import { document_of } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { changed, go } from "../route.js";
import { signal } from "../store.js";
import { age, number, short, time } from "../text.js";
import { empty, loaded, mark } from "../ui.js";

const STATES = ["unknown", "running", "waiting", "done", "tombstone"];
/** Milliseconds between two looks at the store. */
const PAUSE = 2000;

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const query = signal(route.query);
  const path = () => `/ledger.json?${query.value}`;
  const found = document_of(path);
  void found.reload();
  const timer = setInterval(() => document.hidden || found.reload(), PAUSE);

  /** @param {Event} event */
  function submit(event) {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    go(changed({ method: String(form.get("method")), caller: String(form.get("caller")), after: null }));
  }

  /** @param {any} data */
  function page(data) {
    const state = query.value.get("state") ?? "";
    const all = Object.values(data.counts ?? {}).reduce((sum, each) => sum + each, 0);
    return html`
      <div class="head"><h1 tabindex="-1">Ledger</h1>
        <form role="search" @submit=${submit}>
          <label class="quiet" for="method">Method</label>
          <input id="method" name="method" placeholder="method" .value=${query.value.get("method") ?? ""}>
          <label class="quiet" for="caller">Caller</label>
          <input id="caller" name="caller" placeholder="caller" .value=${query.value.get("caller") ?? ""}>
          <button type="submit">Filter</button>
        </form></div>
      <nav class="tabs" aria-label="States">
        <a href=${changed({ state: null, after: null })} aria-current=${state ? nothing : "true"}>all <b>${number(all)}</b></a>
        ${STATES.map((each) => html`<a href=${changed({ state: each, after: null })} aria-current=${state === each ? "true" : nothing}>
          ${mark(each)} <b>${number(data.counts?.[each] ?? 0)}</b></a>`)}
      </nav>
      ${data.records.length ? table(data) : nobody(state, all)}
    `;
  }

  /** @param {any} data */
  function table(data) {
    return html`<div class="sideways" tabindex="0" role="region" aria-label="Records"><table class="rows">
      <caption class="quiet">Records, the newest first</caption>
      <thead><tr><th scope="col">State</th><th scope="col">Key</th><th scope="col">Method</th>
        <th scope="col" class="w2">Caller</th><th scope="col" class="w1 right">Attempts</th><th scope="col">Began</th>
        <th scope="col" class="w2">Ended</th><th scope="col" class="w2 right">Lease</th><th scope="col" class="w3">Answer</th>
        <th scope="col" class="w3">Digest</th></tr></thead>
      <tbody>${data.records.map((/** @type {any} */ each) => html`<tr>
        <td>${mark(each.state)}</td>
        <td class="name"><a href=${`/ledger/${encodeURIComponent(each.id)}`}>${short(each.key, 40)}</a></td>
        <td class="name">${short(each.method)}</td>
        <td class="w2 name">${each.caller ? short(each.caller, 24) : html`<span class="muted">anonymous</span>`}</td>
        <td class="w1 right">${each.attempts}</td>
        <td>${time(each.started_at, true)}</td>
        <td class="w2">${time(each.completed_at, true)}</td>
        <td class="w2 right">${each.state === "running" ? age(each.lease_left_s) : "–"}</td>
        <td class="w3">${each.resolved_by ? `by ${short(each.resolved_by, 20)}` : (each.delivery ?? "–")}</td>
        <td class="w3 name">${each.digest ? each.digest.slice(0, 12) : "–"}</td>
      </tr>`)}</tbody></table></div>
      ${data.next ? html`<p><a href=${changed({ after: data.next })}>Older records</a></p>` : nothing}`;
  }

  return {
    title: "Ledger",
    json: path,
    update: (next) => {
      query.value = next.query;
      void found.reload();
      return true;
    },
    close: () => clearInterval(timer),
    view: () => loaded(found, page),
  };
}

/**
 * @param {string} state
 * @param {number} all
 */
function nobody(state, all) {
  if (state === "unknown") {
    return empty("Nothing is unknown", html`<p>A record becomes unknown when a server dies while a command runs, and
      nothing says whether it took effect. Then a person decides, here or with <code>wirecall ledger resolve</code>.</p>`);
  }
  if (all) return empty("No record here", html`<p><a href="/ledger">Show all ${number(all)} records</a></p>`);
  return empty("There are no records yet", html`
    <p>A record appears when a command is called with a key. The key makes a retry safe: the command takes effect once.</p>
    <pre>@app.command
async def charge(order: str, cents: int) -&gt; str:
    ...</pre>
    <p><a href="/methods">Try a command</a> of this server: the form gives it a key.</p>`);
}
