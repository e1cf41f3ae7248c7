/** The frame around the pages: sign-in, navigation, keys, help. */

import { get } from "./api.js";
import { follow, link, numbers, stay } from "./feed.js";
import { html, nothing, render } from "./lit-html.js";
import { go, route, start as startRoute } from "./route.js";
import { askLink, reason, start as startSession, state } from "./session.js";
import { effect, signal } from "./store.js";
import { visible } from "./text.js";
import { copy, indented, said, toast } from "./ui.js";
import { open as audit } from "./views/audit.js";
import { open as batch } from "./views/batch.js";
import { open as call } from "./views/call.js";
import { open as calls } from "./views/calls.js";
import { open as ledger } from "./views/ledger.js";
import { open as methods } from "./views/methods.js";
import { open as now } from "./views/now.js";
import { open as record } from "./views/record.js";
import { applied, open as settings } from "./views/settings.js";
import { open as attempt } from "./views/try.js";
import { open as upstream } from "./views/upstream.js";
import { open as upstreams } from "./views/upstreams.js";

/**
 * @typedef {object} Page
 * @property {string} title
 * @property {() => unknown} view
 * @property {(route: import("./route.js").Route) => boolean} [update] whether it shows the new address itself
 * @property {Record<string, () => void>} [keys]
 * @property {() => void} [close]
 * @property {() => string} [json] the address of its twin
 */

const NAV = [
  { page: "now", href: "/", word: "Now", key: "n" },
  { page: "calls", href: "/calls", word: "Calls", key: "c" },
  { page: "ledger", href: "/ledger", word: "Ledger", key: "l" },
  { page: "methods", href: "/methods", word: "Methods", key: "m" },
  { page: "upstreams", href: "/upstreams", word: "Upstreams", key: "u" },
  { page: "audit", href: "/audit", word: "Audit", key: "a" },
  { page: "settings", href: "/settings", word: "Settings", key: "s" },
];

/** @type {Record<string, (route: import("./route.js").Route) => Page>} */
const ONE = { calls: call, batches: batch, ledger: record, methods: attempt, upstreams: upstream };
/** @type {Record<string, (route: import("./route.js").Route) => Page>} */
const SEVERAL = { now, calls, ledger, methods, upstreams, audit, settings };

/** The pages of this server: a gateway has servers behind it, and no methods of its own. */
function pages() {
  const other = numbers.value?.is_gateway ? "methods" : "upstreams";
  return NAV.filter((each) => each.page !== other);
}

/** @type {Page | null} */
let page = null;
let shown = "";
/** The address that the page shows. */
let seen = /** @type {import("./route.js").Route | null} */ (null);
const help = signal(false);
const twin = signal(/** @type {{path: string, text: string} | null} */ (null));
/** The first key of `g x`. */
let isGoing = false;

/** @param {import("./route.js").Route} here */
function pageOf(here) {
  const place = here.name ? `${here.page}/${here.name}` : here.page;
  if (page && here === seen) return page;
  seen = here;
  if (page && shown === place && (!page.update || page.update(here))) return page;
  page?.close?.();
  const open = here.name ? ONE[here.page] : SEVERAL[here.page];
  page = open ? open(here) : { title: "Not here", view: missing };
  const isOther = shown !== "" && shown !== place;
  shown = place;
  document.title = `${page.title} · wirecall`;
  if (isOther) {
    scrollTo(0, 0);
    requestAnimationFrame(() => document.querySelector("h1")?.focus());
  }
  return page;
}

function missing() {
  return html`<h1 tabindex="-1">There is no such page</h1><p><a href="/">Go to Now</a></p>`;
}

function signIn() {
  return html`<main class="signin" id="main">
    <h1>wirecall console</h1>
    ${state.value === "starting"
      ? html`<p>Signing in…</p>`
      : html`
          <p>Open the link that the terminal of the server printed. It works once, for 60 seconds.</p>
          ${reason.value ? html`<p class="alert" role="alert">${reason.value}</p>` : nothing}
          <button type="button" class="primary" @click=${askLink}>Print a new link in the terminal</button>
          <p class="muted">The link is shown only there, so that only the operator of this server signs in.</p>
        `}
  </main>`;
}

function frame() {
  const here = route.value;
  const current = pageOf(here);
  const unknown = numbers.value?.unknown ?? 0;
  return html`
    <a class="skip" href="#main" @click=${skip}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="/">wirecall</a>
      <nav aria-label="Pages">
        ${pages().map(
          (each) => html`<a href=${each.href} aria-current=${each.page === place(here) ? "page" : nothing}>
            ${each.word}${each.page === "ledger" && unknown ? html` <span class="count bad">${unknown} <span class="word">unknown</span></span>` : nothing}</a>`,
        )}
      </nav>
      <span class="live ${link.value}"><span aria-hidden="true">●</span> ${LINKS[link.value]}</span>
      ${current.json ? html`<button type="button" @click=${() => showTwin(current)}>JSON</button>` : nothing}
      <button type="button" @click=${() => (help.value = true)}>Keys</button>
    </header>
    ${link.value === "away"
      ? html`<div class="alert" role="alert">The server does not answer. What is here stays; the page connects again by itself.</div>`
      : nothing}
    <main id="main" tabindex="-1">${current.view()}</main>
    <footer><span role="status">${said.value}</span></footer>
    ${toast.value ? html`<div class="toast" role="status">${toast.value}</div>` : nothing}
    ${help.value ? helpDialog(current) : nothing} ${twin.value ? twinDialog(twin.value) : nothing}
  `;
}

/** @type {Record<string, string>} */
const LINKS = { live: "live", connecting: "connecting", away: "no connection" };

/** @param {import("./route.js").Route} here */
function place(here) {
  return here.page === "batches" ? "calls" : here.page;
}

/** @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

/** @param {Page} current */
async function showTwin(current) {
  const path = /** @type {() => string} */ (current.json)();
  try {
    twin.value = { path, text: indented(JSON.stringify(await get(path))) };
  } catch (error) {
    twin.value = { path, text: String(error) };
  }
}

/**
 * Opens as a modal dialog when it is in the page; the focus returns when it closes.
 * @param {string} name
 * @param {() => void} onClose
 */
function modal(name, onClose) {
  requestAnimationFrame(() => {
    const dialog = /** @type {HTMLDialogElement | null} */ (document.getElementById(name));
    if (!dialog || dialog.open) return;
    dialog.addEventListener("close", onClose, { once: true });
    dialog.showModal();
  });
}

/** @param {{path: string, text: string}} found */
function twinDialog(found) {
  modal("twin", () => (twin.value = null));
  return html`<dialog id="twin" aria-labelledby="twin-title">
    <h2 id="twin-title">This page as JSON</h2>
    <p><code>GET ${found.path}</code> with the cookie and the header <code>X-Wirecall-Tab</code>.</p>
    <pre tabindex="0" aria-label="JSON">${visible(found.text)}</pre>
    <p class="actions"><button type="button" @click=${() => copy(found.text)}>Copy</button>
    <button type="button" class="primary" @click=${closeDialog}>Close</button></p>
  </dialog>`;
}

/** @param {Page} current */
function helpDialog(current) {
  modal("help", () => (help.value = false));
  const own = Object.keys(current.keys ?? {});
  return html`<dialog id="help" aria-labelledby="help-title">
    <h2 id="help-title">Keys</h2>
    <table><caption class="quiet">Keys and what they do</caption>
      <thead><tr><th scope="col">Key</th><th scope="col">Does</th></tr></thead><tbody>
      ${pages().map((each) => html`<tr><td><kbd>g</kbd> <kbd>${each.key}</kbd></td><td>go to ${each.word}</td></tr>`)}
      <tr><td><kbd>t</kbd></td><td>change the theme</td></tr>
      <tr><td><kbd>?</kbd></td><td>this list</td></tr>
      <tr><td><kbd>Esc</kbd></td><td>close, or leave a field</td></tr>
      ${own.map((key) => html`<tr><td><kbd>${key}</kbd></td><td>${WORDS[key] ?? "on this page"}</td></tr>`)}
    </tbody></table>
    <p>Single keys can be switched off in the settings. They do nothing inside a field.</p>
    <p class="actions"><button type="button" class="primary" @click=${closeDialog}>Close</button></p>
  </dialog>`;
}

/** @type {Record<string, string>} */
const WORDS = {
  j: "next row",
  k: "previous row",
  "/": "filter",
  p: "pause the list, not the capture",
  c: "copy as a command line",
  C: "copy as cURL",
  r: "open in Try; it sends nothing",
  y: "copy the key",
  x: "probe the upstream",
  w: "waterfall or table",
  "[": "previous entry of the batch",
  "]": "next entry of the batch",
};

/** @param {Event} event */
function closeDialog(event) {
  /** @type {HTMLElement} */ (event.currentTarget).closest("dialog")?.close();
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  const target = /** @type {HTMLElement} */ (event.target);
  const isField = target.matches?.("input, textarea, select, [contenteditable]");
  if (event.key === "Escape" && isField) target.blur();
  if (isField || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]") || state.value !== "in") return;
  if (localStorage.getItem("wc-keys") === "off") return;
  if (isGoing) {
    isGoing = false;
    const found = NAV.find((each) => each.key === event.key);
    if (found) {
      event.preventDefault();
      go(found.href);
    }
    return;
  }
  const action = page?.keys?.[event.key];
  if (action) {
    event.preventDefault();
    action();
  } else if (event.key === "g") isGoing = true;
  else if (event.key === "?") help.value = true;
  else if (event.key === "t") applied(nextTheme());
}

function nextTheme() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const current = localStorage.getItem("wc-theme") ?? (isDark ? "dark" : "light");
  return current === "dark" ? "light" : "dark";
}

applied(localStorage.getItem("wc-theme"));
startRoute();
addEventListener("keydown", onKey);
effect(() => {
  if (state.value !== "in") return;
  if (route.value.page !== "calls") follow("");
  else if (route.value.name) stay();
});
effect(() => {
  render(state.value === "in" ? frame() : signIn(), document.body);
});
void startSession();
