/** Audit: the lines of the trail, and whether its chain is whole. */

import { document_of, post, save } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { changed, go } from "../route.js";
import { signal } from "../store.js";
import { duration, number, short, time, visible } from "../text.js";
import { command, copy, empty, loaded, outcome, tell } from "../ui.js";

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const query = signal(route.query);
  const path = () => `/audit.json?${query.value}`;
  const found = document_of(path);
  const verified = signal(/** @type {any} */ (null));
  void found.reload();
  const timer = setInterval(() => document.hidden || query.value.get("before") || found.reload(), 3000);

  async function verify() {
    try {
      verified.value = await post("/audit/verify", {});
      tell(verified.value.ok ? "The chain is whole." : "The chain is broken.");
    } catch (error) {
      tell(String(/** @type {Error} */ (error).message));
    }
  }

  /** Every line of the trail that fits, also those that this page does not show. */
  async function exported() {
    const filter = query.value.get("filter") ?? "";
    try {
      await save(`/audit.ndjson?${new URLSearchParams({ filter })}`, "audit.jsonl");
      tell(filter ? "The lines that fit are saved." : "The whole trail is saved.");
    } catch (error) {
      tell(String(/** @type {Error} */ (error).message));
    }
  }

  /** @param {any} data */
  function page(data) {
    if (!data.path) return html`<h1 tabindex="-1">Audit</h1>${nobody(data.start)}`;
    const state = verified.value ?? data.verified;
    const lines = data.lines.map((/** @type {any} */ each) => JSON.stringify(each)).join("\n");
    return html`
      <div class="head"><h1 tabindex="-1">Audit</h1>
        <form role="search" @submit=${submit}>
          <label class="quiet" for="audit-filter">Filter</label>
          <input id="audit-filter" name="filter" type="search" placeholder="a caller, a method, a key or an outcome" .value=${query.value.get("filter") ?? ""}>
          <button type="submit">Filter</button></form></div>
      <p class="facts"><span class="name">${visible(data.path)}</span>${chain(state)}</p>
      <div class="actions"><button type="button" @click=${verify}>Verify the chain</button>
        <button type="button" @click=${exported}>Export as NDJSON</button>
        <button type="button" @click=${() => copy(lines, "Copied as NDJSON")}>Copy these lines</button></div>
      ${state && !state.ok ? html`<div class="alert" role="alert"><ul>${state.problems.slice(0, 20).map((/** @type {any} */ each) => html`<li>Line ${each[0]}: ${visible(each[1])}</li>`)}</ul></div>` : nothing}
      ${data.lines.length ? table(data) : empty("No line fits", html`<p><a href=${changed({ filter: null, before: null })}>Show all lines</a></p>`)}
    `;
  }

  /** @param {Event} event */
  function submit(event) {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    go(changed({ filter: String(form.get("filter")), before: null }));
  }

  return {
    title: "Audit",
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

/** @param {any} state */
function chain(state) {
  if (!state) return html`<span class="muted">not verified since the console started</span>`;
  if (!state.ok) return html`<span class="mark bad">✗ the chain is broken: ${state.problems.length} problems</span>`;
  return html`<span class="mark good">✓ verified up to line ${number(state.lines)}</span> ${time(state.at)}`;
}

/** @param {any} data */
function table(data) {
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Lines"><table class="rows"><caption class="quiet">Lines of the trail, the newest first</caption>
    <thead><tr><th scope="col" class="w1 right">Line</th><th scope="col">Time</th><th scope="col">Outcome</th><th scope="col" class="w2">What</th><th scope="col">Method</th>
      <th scope="col" class="w2">Caller</th><th scope="col" class="w2">Key</th><th scope="col" class="w1 right">Duration</th><th scope="col" class="w3">Hash</th></tr></thead>
    <tbody>${data.lines.map((/** @type {any} */ each) => html`<tr><td class="w1 right">${each.number}</td><td>${time(each.time, true)}</td>
      <td>${outcome(each)}${each.replayed && each.outcome !== "ok" ? html` <span class="mark replay">↻ replayed</span>` : nothing}</td>
      <td class="w2 name">${each.action ? visible([each.action.what, each.action.verdict?.replace("_", " ")].filter(Boolean).join(": ")) : html`<span class="muted">call</span>`}</td>
      <td class="name">${short(each.method)}</td>
      <td class="w2 name">${each.caller ? short(each.caller, 24) : html`<span class="muted">anonymous</span>`}</td>
      <td class="w2 name">${each.key ? short(each.key, 28) : "–"}</td>
      <td class="w1 right">${duration(each.duration_ms)}</td><td class="w3 name">${String(each.hash ?? "").slice(0, 12)}</td></tr>`)}</tbody></table></div>
    ${data.more ? html`<p><a href=${changed({ before: String(data.more) })}>Older lines</a></p>` : nothing}`;
}

/** @param {string | undefined} line how the server is started with one */
function nobody(line) {
  return empty("This server keeps no audit trail", html`
    <p>The trail has one line for each command: caller, method, key, outcome. Each line holds the hash of the one before it, so a changed line is found.</p>
    ${line ? command(line) : html`<pre>[audit]
file = "audit.jsonl"</pre>`}`);
}
