/**
 * Signing in. The link's secret is in the fragment, which is removed at once. The value of the tab
 * is kept for this tab alone; another tab of this console asks the open ones for it.
 */

import { signal } from "./store.js";

const TAB = "wc-tab";
const ROLE = "wc-role";
/** Milliseconds for another tab to answer. */
const PATIENCE = 400;

/** "starting", "in", or "out". */
export const state = signal("starting");
/** "look" or "act". */
export const role = signal(sessionStorage.getItem(ROLE) ?? "look");
/** Why nobody is signed in. */
export const reason = signal("");

const channel = new BroadcastChannel("wirecall-console");
channel.onmessage = (/** @type {MessageEvent} */ event) => {
  const tab = sessionStorage.getItem(TAB);
  if (event.data?.ask && tab) channel.postMessage({ tab, role: role.value });
  else if (event.data?.tab && state.value !== "in") keep(event.data.tab, event.data.role);
};

/** @returns {Record<string, string>} */
export function headers() {
  return { "X-Wirecall-Tab": sessionStorage.getItem(TAB) ?? "" };
}

/**
 * @param {string} tab
 * @param {string} given
 */
function keep(tab, given) {
  sessionStorage.setItem(TAB, tab);
  sessionStorage.setItem(ROLE, given);
  role.value = given;
  state.value = "in";
}

/** @param {string} why */
export function forget(why) {
  sessionStorage.removeItem(TAB);
  reason.value = why;
  state.value = "out";
}

/**
 * @param {string} path
 * @param {object} body
 */
function post(path, body) {
  return fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

export async function start() {
  const link = new URLSearchParams(location.hash.slice(1)).get("link");
  if (link) {
    history.replaceState(null, "", location.pathname + location.search);
    const answer = await post("/session", { link });
    const document = await answer.json();
    if (answer.ok) {
      keep(document.tab, document.role);
      channel.postMessage({ tab: document.tab, role: document.role });
    } else forget(document.error.message);
    return;
  }
  if (sessionStorage.getItem(TAB)) {
    state.value = "in";
    return;
  }
  channel.postMessage({ ask: true });
  setTimeout(() => {
    if (state.value === "starting") forget("");
  }, PATIENCE);
}

/** Let the server print another link in its terminal. */
export async function askLink() {
  const answer = await post("/session/link", {});
  const document = await answer.json();
  reason.value = answer.ok
    ? "A new link is in the server's terminal. It works once, for 60 seconds."
    : document.error.message;
}

export async function end() {
  await post("/session/end", {});
  forget("You have signed out.");
}
