/** Try: a form from the schema beside the text that is sent. The text is the truth. */

import { document_of, get, post } from "../api.js";
import { fields } from "../form.js";
import { parse, put } from "../json.js";
import { html, nothing } from "../lit-html.js";
import { role } from "../session.js";
import { signal } from "../store.js";
import { duration, short, visible } from "../text.js";
import { loaded, mark, payload } from "../ui.js";
import { badges } from "./methods.js";

/**
 * @param {import("../route.js").Route} route
 * @returns {import("../app.js").Page}
 */
export function open(route) {
  const name = route.name.replace(/\/try$/, "");
  const path = `/methods/${encodeURIComponent(name)}/try`;
  const found = document_of(() => `${path}.json`);
  const text = signal(route.query.get("params") ?? "{}");
  const key = signal(route.query.get("key") ?? newKey());
  const confirm = signal("");
  const answer = signal(/** @type {any} */ (null));
  const problem = signal("");
  const isBusy = signal(false);
  void begin();

  async function begin() {
    await found.reload();
    const call = route.query.get("call");
    if (!call) return;
    const shown = await get(`/calls/${encodeURIComponent(call)}.json`).catch(() => null);
    if (shown?.body?.params) text.value = shown.body.params;
    if (shown?.row?.key) key.value = shown.row.key;
  }

  /**
   * @param {(string | number)[]} place
   * @param {string | undefined} value
   */
  function change(place, value) {
    try {
      text.value = put(text.value.trim() || "{}", place, value);
      problem.value = "";
    } catch (error) {
      problem.value = /** @type {Error} */ (error).message;
    }
  }

  /** @param {any} method */
  function mustConfirm(method) {
    return method.kind === "command" && method.annotations?.destructiveHint !== false;
  }

  async function send() {
    const method = found.data.value;
    isBusy.value = true;
    problem.value = "";
    try {
      const body = /** @type {Record<string, unknown>} */ ({ params: text.value, key: method.kind === "command" ? key.value || null : null });
      if (mustConfirm(method)) body.confirm = confirm.value;
      answer.value = await post(path, body);
    } catch (error) {
      const failure = /** @type {import("../api.js").ApiError} */ (error);
      problem.value = `${failure.message} ${failure.document?.error?.hint ?? ""}`;
    } finally {
      isBusy.value = false;
    }
  }

  /** @param {any} method */
  function page(method) {
    let root = null;
    let wrong = "";
    try {
      root = parse(text.value);
    } catch (error) {
      wrong = /** @type {Error} */ (error).message;
    }
    const isCommand = method.kind === "command";
    const isReady = !wrong && !isBusy.value && role.value === "act" && (!mustConfirm(method) || confirm.value === method.name);
    return html`
      <p class="crumbs"><a href="/methods">Methods</a></p>
      <div class="head"><h1 tabindex="-1" class="name">${short(method.name)}</h1><span>${badges(method)}</span></div>
      ${method.description ? html`<p>${visible(method.description)}</p>` : nothing}
      ${role.value === "act" ? nothing : html`<p class="alert">This console only shows. Sending is off (--console-readonly).</p>`}
      <div class="halves">
        <section><h2>Form</h2>${fields(method.params, root, change)}</section>
        <div><section><h2>Text</h2>
          <label for="params">Params as JSON; they are sent exactly as they are here</label>
          <textarea id="params" spellcheck="false" aria-invalid=${wrong ? "true" : "false"} aria-describedby="params-problem" .value=${text.value}
            @input=${(/** @type {any} */ event) => (text.value = event.target.value)}></textarea>
          <p id="params-problem" class=${wrong ? "problem" : "quiet"}>${wrong}</p>
          <h3>Message</h3><pre tabindex="0" aria-label="Message">${visible(message(method.name, text.value, isCommand ? key.value : ""))}</pre>
        </section>
        <section><h2>Send</h2>
        ${isCommand ? html`<div class="field"><label for="key">Key</label>
          <input id="key" autocomplete="off" spellcheck="false" .value=${key.value} @input=${(/** @type {any} */ event) => (key.value = event.target.value)}>
          <small>The same key again returns the first answer: the command takes effect once.</small>
          <p class="actions"><button type="button" @click=${() => (key.value = newKey())}>New key</button></p></div>` : nothing}
        ${mustConfirm(method) ? html`<div class="field"><label for="confirm">${method.annotations?.destructiveHint ? "This method destroys something" : "This method does not say that it is harmless"}: type its name to send</label>
          <input id="confirm" autocomplete="off" spellcheck="false" .value=${confirm.value} @input=${(/** @type {any} */ event) => (confirm.value = event.target.value)}></div>` : nothing}
        ${problem.value ? html`<p class="alert" role="alert">${visible(problem.value)}</p>` : nothing}
        <p class="actions"><button type="button" class="primary" ?disabled=${!isReady} @click=${send}>Send</button>
          ${isBusy.value ? html`<span class="muted">waiting…</span>` : nothing}</p>
        ${answer.value ? result(answer.value) : nothing}
      </section></div></div>`;
  }

  return { title: `Try ${name}`, json: () => `${path}.json`, view: () => loaded(found, page) };
}

function newKey() {
  return `try-${crypto.randomUUID().slice(0, 13)}`;
}

/**
 * The message that the server makes of the params, which stay as they are.
 * @param {string} name
 * @param {string} params
 * @param {string} key
 */
function message(name, params, key) {
  let text = params.trim() || "{}";
  if (key && text.startsWith("{")) {
    const inside = text.slice(1).trimStart();
    text = `{"idempotency_key":${JSON.stringify(key)}${inside.startsWith("}") ? "" : ","}${inside}`;
  }
  return `{"jsonrpc":"2.0","id":1,"method":${JSON.stringify(name)},"params":${text}}`;
}

/** @param {any} answer */
function result(answer) {
  return html`<div aria-live="polite">
    <p>${answer.replayed ? mark("replayed", " from the ledger: nothing ran") : html`<span class="mark info">▸ ran</span>`} in ${duration(answer.ms)}
      ${answer.call ? html`· <a href=${`/calls/${encodeURIComponent(answer.call)}`}>the call</a>` : nothing}</p></div>
    ${payload(answer.answer, "Answer")}${payload(answer.message, "Message that was sent")}`;
}
