/** Upstream: one server behind a gateway, its process, its tools, and a question to it. */

import { document_of, post } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { role } from "../session.js";
import { signal } from "../store.js";
import { age, duration, number, percent, short, time, visible } from "../text.js";
import { loaded } from "../ui.js";
import { badges } from "./methods.js";
import { health, retry } from "./upstreams.js";

const PAUSE = 2000;

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const path = `/upstreams/${encodeURIComponent(route.name)}.json`;
  const found = document_of(() => path);
  const isBusy = signal(false);
  const probed = signal(/** @type {any} */ (null));
  void found.reload();
  const timer = setInterval(() => document.hidden || found.reload(), PAUSE);

  async function probe() {
    isBusy.value = true;
    try {
      probed.value = await post(path.replace(/\.json$/, "/probe"), {});
      found.data.value = probed.value.upstream;
    } catch (error) {
      probed.value = { ok: false, error: /** @type {Error} */ (error).message, ms: null };
    } finally {
      isBusy.value = false;
    }
  }

  /** @param {any} data */
  function page(data) {
    return html`
      <p class="crumbs"><a href="/upstreams">Upstreams</a></p>
      <div class="head"><h1 tabindex="-1" class="name">${short(data.name, 48)}</h1><span>${health(data)}${retry(data)}</span></div>
      <div class="actions">
        ${role.value === "act" ? html`<button type="button" ?disabled=${isBusy.value} @click=${probe}>Probe</button>
          <span class="muted">Asks for its tools, and starts it if it does not run. No tool is called.</span>` : nothing}
        <a href=${`/calls?filter=${encodeURIComponent(`method:"*:${data.label}/*"`)}`}>Its calls</a></div>
      <div aria-live="polite">${probed.value ? answer(probed.value) : nothing}</div>
      ${data.reason && !data.up ? html`<div class="alert">${visible(data.reason)}</div>` : nothing}
      <section><h2>State</h2>${facts(data)}</section>
      <section><h2>Last lines on stderr</h2>${data.stderr.length
        ? html`<pre tabindex="0" aria-label="stderr">${visible(data.stderr.join("\n"))}</pre>`
        : html`<p class="muted">${data.transport === "stdio" ? "It has printed nothing." : "A server over HTTP keeps its own log."}</p>`}</section>
      <section><h2>Tools</h2>${tools(data.tools ?? [])}</section>
    `;
  }

  return {
    title: route.name,
    json: () => path,
    keys: { x: () => role.value === "act" && void probe() },
    close: () => clearInterval(timer),
    view: () => loaded(found, page),
  };
}

/** @param {any} found */
function answer(found) {
  const ms = found.ms === null ? nothing : html` after ${duration(found.ms)}`;
  if (!found.ok) return html`<p class="alert">✗ ${visible(found.error)}${ms}</p>`;
  return html`<p><span class="mark good">✓ answered</span>${ms}: ${number(found.tools)} tools.</p>`;
}

/** @param {any} data */
function facts(data) {
  return html`<dl>
    <dt>Since</dt><dd>${time(Date.parse(data.since) / 1000, true)}</dd>
    <dt>Transport</dt><dd>${data.transport}</dd>
    <dt>Revision</dt><dd>${data.revisions.join(", ") || "no conversation is open"}${data.client_revisions.length ? html` <span class="muted">clients: ${data.client_revisions.join(", ")}</span>` : nothing}</dd>
    <dt>Sessions</dt><dd>${data.sessions}</dd>
    <dt>In flight</dt><dd>${data.in_flight} of ${data.limit}, ${data.queued} wait for a place</dd>
    <dt>Calls</dt><dd>${data.calls ? html`${number(data.calls)} · p50 ${duration(data.p50_ms)} · p95 ${duration(data.p95_ms)} · ${percent(data.errors / data.calls)} errors` : "none yet"}</dd>
    <dt>Breaker</dt><dd>${data.breaker}${retry(data)}</dd>
    ${data.transport === "stdio" ? html`
      <dt>Process</dt><dd>${data.pids.join(" ") || "none runs"}${data.age_s === null ? nothing : html`, for ${age(data.age_s)}`}</dd>
      <dt>Starts</dt><dd>${data.starts}</dd>` : nothing}
    <dt>Records</dt><dd class="name">${data.label}</dd>
  </dl>`;
}

/** @param {any[]} list */
function tools(list) {
  if (!list.length) return html`<p class="muted">Its list of tools was not read yet. A probe reads it.</p>`;
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Tools"><table class="rows tools"><caption class="quiet">Tools that clients get</caption>
    <thead><tr><th scope="col">Tool</th><th scope="col">Is a</th><th scope="col" class="w1">Recorded</th><th scope="col">It says of itself</th></tr></thead>
    <tbody>${list.map((each) => html`<tr><td class="name">${short(each.name, 60)}</td><td>${each.kind}</td>
      <td class="w1">${each.recorded ? "yes" : "no"}</td><td>${badges(each)}</td></tr>`)}</tbody></table></div>`;
}
