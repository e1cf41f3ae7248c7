/** Upstreams: the servers behind a gateway. */

import { document_of } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { age, duration, number, short, visible } from "../text.js";
import { command, empty, loaded } from "../ui.js";

/** Milliseconds between two looks. */
const PAUSE = 2000;

/** @returns {import("../app.js").Page} */
export function open() {
  const found = document_of(() => "/upstreams.json");
  void found.reload();
  const timer = setInterval(() => document.hidden || found.reload(), PAUSE);
  return {
    title: "Upstreams",
    json: () => "/upstreams.json",
    close: () => clearInterval(timer),
    view: () => loaded(found, page),
  };
}

/** @param {any} data */
function page(data) {
  if (!data.is_gateway) return html`<h1 tabindex="-1">Upstreams</h1>${nothingBehind()}`;
  const down = data.upstreams.filter((/** @type {any} */ each) => !each.up).length;
  return html`
    <div class="head"><h1 tabindex="-1">Upstreams</h1>
      ${down ? html`<span class="mark bad">✗ ${down} down</span>` : html`<span class="mark good">✓ all up</span>`}</div>
    <section><div class="sideways" tabindex="0" role="region" aria-label="Upstreams"><table class="rows">
      <caption class="quiet">Servers behind this gateway</caption>
      <thead><tr><th scope="col">Name</th><th scope="col">State</th><th scope="col" class="w1">Transport</th><th scope="col" class="w2">Revision</th>
        <th scope="col" class="w1 right">In flight</th><th scope="col" class="right w1">Queue</th><th scope="col" class="right">p95</th>
        <th scope="col" class="right w1">Calls</th><th scope="col" class="right w2">Process</th><th scope="col" class="right w2">Starts</th></tr></thead>
      <tbody>${data.upstreams.map((/** @type {any} */ each) => line(each, data.at))}</tbody></table></div></section>
    ${data.upstreams.filter((/** @type {any} */ each) => !each.up && each.reason).map((/** @type {any} */ each) => html`
      <div class="alert"><strong>${short(each.name, 48)}</strong>: ${visible(each.reason)}</div>`)}
  `;
}

/**
 * @param {any} each
 * @param {number} at
 */
function line(each, at) {
  return html`<tr><td class="name"><a href=${`/upstreams/${encodeURIComponent(each.name)}`}>${short(each.name, 48)}</a></td>
    <td>${health(each)}<span class="muted w1"> for ${age(at - Date.parse(each.since) / 1000)}</span>${retry(each)}</td>
    <td class="w1">${each.transport}</td><td class="w2">${each.revisions.join(", ") || "–"}</td>
    <td class="w1 right">${each.in_flight}/${each.limit}</td><td class="right w1">${each.queued}</td>
    <td class="right">${each.calls ? duration(each.p95_ms) : "–"}</td><td class="right w1">${number(each.calls)}</td>
    <td class="right w2">${each.pids.join(" ") || "–"}</td><td class="right w2">${each.starts || "–"}</td></tr>`;
}

/** The state as a sign and a word. @param {any} each */
export function health(each) {
  if (each.up && each.breaker !== "open") return html`<span class="mark good">✓ up</span>`;
  return html`<span class="mark bad">✗ down</span>`;
}

/** When the next call is let through. @param {any} each */
export function retry(each) {
  if (each.breaker !== "open") return nothing;
  return html`<span class="muted">, next try in ${Math.ceil(each.breaker_left_s)} s</span>`;
}

function nothingBehind() {
  return empty("No servers are behind this one", html`
    <p>A gateway stands in front of MCP servers, and this page shows the state of each. Name them in wirecall.toml, then:</p>
    ${command("wirecall gateway run --console")}`);
}
