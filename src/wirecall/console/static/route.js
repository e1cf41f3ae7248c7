/** The address is the whole state of a page. */

import { signal } from "./store.js";

/** @typedef {{page: string, name: string, query: URLSearchParams, path: string}} Route */

/** @returns {Route} */
function here() {
  const path = location.pathname;
  const [, page = "", ...rest] = path.split("/");
  return {
    page: page || "now",
    name: rest.map(decodeURIComponent).join("/"),
    query: new URLSearchParams(location.search),
    path,
  };
}

export const route = signal(here());

/**
 * @param {string} address
 * @param {{replace?: boolean}} [how]
 */
export function go(address, how = {}) {
  if (how.replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  route.value = here();
}

/**
 * The address of this page with other parameters; an empty one is left out.
 * @param {Record<string, string | null>} changes
 */
export function changed(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  const text = query.toString();
  return location.pathname + (text ? `?${text}` : "");
}

/** Follow links of the console without loading the page again. */
export function start() {
  addEventListener("popstate", () => (route.value = here()));
  addEventListener("click", (event) => {
    const target = /** @type {Element} */ (event.target);
    const anchor = target.closest?.("a[href^='/']");
    if (!anchor || event.defaultPrevented || event.button) return;
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(/** @type {string} */ (anchor.getAttribute("href")));
  });
}
