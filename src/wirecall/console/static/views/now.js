/** Now: what happens, and what needs a person. */

import { document_of } from "../api.js";
import { numbers } from "../feed.js";
import { html, nothing } from "../lit-html.js";
import { age, duration, number, percent, short, time, visible } from "../text.js";
import { command, empty, loaded, spark } from "../ui.js";

/** Milliseconds between two looks. */
const PAUSE = 2000;
const WORDS = /** @type {Record<string, [string, string]>} */ ({
  unknown: ["command with an unknown outcome", "commands with an unknown outcome"],
  waiting: ["command that waits for an answer", "commands that wait for an answer"],
  undelivered: ["answer that did not arrive", "answers that did not arrive"],
  worker: ["worker that has ended", "workers that have ended"],
  upstream: ["upstream that is down", "upstreams that are down"],
});

/** @returns {import("../app.js").Page} */
export function open() {
  const found = document_of(() => "/now.json");
  void found.reload();
  const timer = setInterval(() => document.hidden || found.reload(), PAUSE);
  return {
    title: "Now",
    json: () => "/now.json",
    close: () => clearInterval(timer),
    view: () => loaded(found, page),
  };
}

/** @param {any} data */
function page(data) {
  const tiles = { ...data.tiles, ...numbers.value?.tiles };
  const sparks = data.sparks;
  const span = `${Math.round((sparks.step_s * sparks.calls.length) / 60)} minutes`;
  return html`
    <div class="head"><h1 tabindex="-1">Now</h1><span class="muted">since ${time(data.since, true)}</span></div>
    ${data.ledger_error ? html`<div class="alert" role="alert"><strong>The ledger cannot be read.</strong> ${visible(data.ledger_error)}</div>` : nothing}
    <div class="tiles">
      ${tile("Calls per second", perSecond(tiles.calls_per_s), sparks.calls, span, "")}
      ${tile("Errors per second", perSecond(tiles.errors_per_s), sparks.errors, span, "bad")}
      ${tile("95 % take at most (p95)", duration(tiles.p95_ms || null), sparks.p95_ms, span, "")}
      ${tile("Runs saved by replay", number(tiles.saved), sparks.saved, span, "replay")}
    </div>
    ${person(data)}
    ${data.totals.calls ? tables(data) : empty("Nothing has been called yet", html`
      <p>Numbers appear with the first call. ${data.first_call ? "In another terminal:" : nothing}</p>
      ${data.first_call ? command(data.first_call) : nothing}`)}
    <section><h2>Workers</h2>${workers(data.workers)}</section>
  `;
}

/** @param {number} value */
function perSecond(value) {
  if (!value) return "0";
  return value < 10 ? value.toFixed(1) : number(Math.round(value));
}

/**
 * @param {string} word
 * @param {string} figure
 * @param {number[]} values
 * @param {string} span
 * @param {string} tone
 */
function tile(word, figure, values, span, tone) {
  return html`<div class="tile ${tone}"><h2>${word}</h2><div class="figure">${figure}</div>
    ${spark(values.map((each) => each ?? 0), `${word}, the last ${span}`)}</div>`;
}

/** @param {any} data */
function person(data) {
  if (!data.person.length) {
    return html`<section class="person calm"><h2>Needs a person</h2><p>✓ Nothing. No outcome is unknown.</p></section>`;
  }
  return html`<section class="person"><h2>Needs a person</h2><ul>${data.person.map((/** @type {any} */ each) => {
    const words = WORDS[each.kind] ?? [each.kind, each.kind];
    const since = each.oldest_at ? html`, the oldest for ${age(data.at - each.oldest_at)}` : nothing;
    const names = each.names ? html`: ${each.names.map((/** @type {string} */ name) => short(name, 40)).join(", ")}` : nothing;
    return html`<li><a href=${each.open}>${number(each.count)} ${words[each.count === 1 ? 0 : 1]}</a>${since}${names}</li>`;
  })}</ul></section>`;
}

/** @param {any} data */
function tables(data) {
  return html`<div class="columns">
    <section><h2>Methods by total time</h2><div class="sideways" tabindex="0" role="region" aria-label="Methods by total time"><table class="rows">
      <caption class="quiet">Methods by total time</caption>
      <thead><tr><th scope="col">Method</th><th scope="col" class="right">Calls</th><th scope="col" class="right">Total</th>
        <th scope="col" class="right w1">p50</th><th scope="col" class="right">p95</th><th scope="col" class="right">Errors</th></tr></thead>
      <tbody>${data.methods.map((/** @type {any} */ each) => html`<tr>
        <td class="name"><a href=${`/calls?filter=${encodeURIComponent(`method:"${each.method}"`)}`}>${short(each.method)}</a></td>
        <td class="right">${number(each.calls)}</td><td class="right">${duration(each.total_ms)}</td>
        <td class="right w1">${duration(each.p50_ms)}</td><td class="right">${duration(each.p95_ms)}</td>
        <td class="right">${percent(each.calls ? each.errors / each.calls : 0)}</td></tr>`)}</tbody></table></div></section>
    <section><h2>Errors</h2>${data.errors.length ? html`<div class="sideways" tabindex="0" role="region" aria-label="Errors"><table class="rows">
      <caption class="quiet">Errors by method and code</caption>
      <thead><tr><th scope="col">Method</th><th scope="col" class="right">Code</th><th scope="col" class="right">Count</th><th scope="col">Last</th></tr></thead>
      <tbody>${data.errors.map((/** @type {any} */ each) => html`<tr>
        <td class="name"><a href=${`/calls?filter=${encodeURIComponent(`method:"${each.method}" code:${each.code}`)}`}>${short(each.method)}</a></td>
        <td class="right">${each.code}</td><td class="right">${number(each.count)}</td>
        <td><a href=${`/calls/${encodeURIComponent(each.call)}`}>${time(each.last_at)}</a></td></tr>`)}</tbody></table></div>` : html`<p>✓ No call has failed.</p>`}</section>
  </div>`;
}

/** @param {any[]} list */
function workers(list) {
  return html`<div class="sideways" tabindex="0" role="region" aria-label="Workers"><table class="rows"><caption class="quiet">Workers</caption>
    <thead><tr><th scope="col">Worker</th><th scope="col">State</th><th scope="col" class="right">Process</th>
      <th scope="col" class="right">In flight</th><th scope="col" class="right">Queued</th></tr></thead>
    <tbody>${list.map((each) => html`<tr class=${each.gone ? "gone" : ""}><td>${each.worker}</td><td>${each.gone ? "! ended" : "✓ serves"}</td>
      <td class="right">${each.pid}</td><td class="right">${each.in_flight}</td><td class="right">${each.queued}</td></tr>`)}</tbody></table></div>`;
}
