/** Methods: what can be called, and what each method declares about itself. */

import { document_of } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { changed, go } from "../route.js";
import { role } from "../session.js";
import { signal } from "../store.js";
import { duration, number, percent, short, visible } from "../text.js";
import { command, empty, icon, loaded } from "../ui.js";

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const query = signal(route.query);
  const found = document_of(() => "/methods.json");
  void found.reload();

  /** @param {any} data */
  function page(data) {
    const wanted = (query.value.get("find") ?? "").toLowerCase();
    const fits = data.methods.filter((/** @type {any} */ each) =>
      `${each.name} ${words(each).map(([word]) => word).join(" ")}`.toLowerCase().includes(wanted));
    return html`
      <div class="head"><h1 tabindex="-1">Methods</h1>
        <form role="search" @submit=${(/** @type {Event} */ event) => event.preventDefault()}>
          <label class="quiet" for="find">Find</label>
          <input id="find" type="search" placeholder="name, or a word such as destructive" .value=${query.value.get("find") ?? ""}
            @input=${(/** @type {any} */ event) => go(changed({ find: event.target.value }), { replace: true })}>
        </form></div>
      <p class="facts">${number(fits.length)} of ${number(data.methods.length)}
        <span>A dashed badge: the method does not say it, so callers assume the worst.</span></p>
      ${data.methods.length ? html`<section aria-label="Methods">${fits.map(line)}</section>` : nobody()}
      ${data.discover && data.methods.length ? html`<p>All of it as OpenRPC:</p>${command(data.discover)}` : nothing}
    `;
  }

  return {
    title: "Methods",
    json: () => "/methods.json",
    keys: { "/": () => /** @type {HTMLElement} */ (document.getElementById("find")).focus() },
    update: (next) => {
      query.value = next.query;
      return true;
    },
    view: () => loaded(found, page),
  };
}

/** @param {any} each */
function line(each) {
  const share = each.calls ? each.errors / each.calls : 0;
  return html`<div class="method">
    <div class="head"><h2 class="name">${short(each.name, 80)}</h2>
      <span class="muted">${each.kind}${each.tool ? " · MCP tool" : ""}</span>
      <span>${badges(each)}</span>
      ${role.value === "act" ? html`<a href=${`/methods/${encodeURIComponent(each.name)}/try`}>Try<span class="quiet"> ${short(each.name, 80)}</span></a>` : nothing}</div>
    ${each.description ? html`<p>${visible(each.description).slice(0, 400)}</p>` : nothing}
    <p class="muted">${each.calls ? html`${number(each.calls)} calls · p50 ${duration(each.p50_ms)} · p95 ${duration(each.p95_ms)} ·
      ${percent(share)} errors · <a href=${`/calls?filter=${encodeURIComponent(`method:${each.rows.map((/** @type {string} */ name) => `"${name}"`).join(",")}`)}`}>its calls</a>` : "not called yet"}</p>
    <details><summary>Schema</summary>${tree(each.params, "Params")}${tree(each.returns, "Result")}</details>
  </div>`;
}

/**
 * The annotations as words, each with its tone and its icon. Unstated is not the same as false.
 * @param {any} each
 * @returns {[string, string, string][]}
 */
export function words(each) {
  const hints = each.annotations ?? {};
  /** @type {[string, string, string][]} */
  const made = [];
  const isReading = hints.readOnlyHint === true || (each.kind === "query" && hints.readOnlyHint !== false);
  made.push(isReading ? ["read-only", "good", "read-only"] : ["writes", "warn", "writes"]);
  if (!isReading) {
    if (hints.destructiveHint === true) made.push(["destructive", "bad", "destructive"]);
    else if (hints.destructiveHint === false) made.push(["only adds", "good", "writes"]);
    else made.push(["destructive unstated", "unstated", "destructive"]);
    if (hints.idempotentHint === true) made.push(["idempotent", "good", "repeatable"]);
    else if (hints.idempotentHint === null || hints.idempotentHint === undefined) made.push(["idempotent unstated", "unstated", "repeatable"]);
  }
  if (hints.openWorldHint === true) made.push(["open-world", "warn", "open-world"]);
  else if (hints.openWorldHint === false) made.push(["closed world", "good", "closed"]);
  else made.push(["open-world unstated", "unstated", "open-world"]);
  const keyed = each.badges?.find((/** @type {string} */ word) => word.startsWith("keyed"));
  if (keyed) made.push([keyed, "replay", "keyed"]);
  return made;
}

/** @param {any} each */
export function badges(each) {
  return words(each).map(([word, tone, sign]) => html`<span class="badge ${tone}">${icon(sign)}${word}</span>`);
}

/**
 * @param {any} schema
 * @param {string} label
 */
function tree(schema, label) {
  if (!schema) return nothing;
  return html`<h3>${label}</h3><pre tabindex="0" aria-label=${label}>${visible(JSON.stringify(schema, null, 2)).slice(0, 20_000)}</pre>`;
}

function nobody() {
  return empty("This app declares nothing", html`<p>Declare a method, and restart:</p><pre>from wirecall import App

app = App("shop")

@app.query
async def price(item: str) -&gt; int:
    return 100</pre>`);
}
