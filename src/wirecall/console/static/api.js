/** Requests for the JSON twins of pages, and actions. */

import { forget, headers } from "./session.js";
import { signal } from "./store.js";

export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {any} document
   */
  constructor(status, document) {
    super(document?.error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.document = document;
  }
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function ask(path, options) {
  const answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  const document = await answer.json().catch(() => null);
  if (answer.status === 401) forget("The session is over, or belongs to another console.");
  if (!answer.ok) throw new ApiError(answer.status, document);
  return document;
}

/** @param {string} path */
export function get(path) {
  return ask(path, {});
}

/**
 * @param {string} path
 * @param {object} body
 */
export function post(path, body) {
  return ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/**
 * Save what an address answers as a file. A link alone would not send the value of the tab.
 * @param {string} path
 * @param {string} name
 */
export async function save(path, name) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw new ApiError(answer.status, await answer.json().catch(() => null));
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(await answer.blob());
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
}

/**
 * The document of a page: its data, or the error, and a function that reads it again.
 * @param {() => string} path
 */
export function document_of(path) {
  const data = signal(/** @type {any} */ (null));
  const error = signal(/** @type {ApiError | Error | null} */ (null));
  let turn = 0;
  async function reload() {
    const mine = ++turn;
    try {
      const found = await get(path());
      if (mine !== turn) return;
      error.value = null;
      data.value = found;
    } catch (failure) {
      if (mine === turn) error.value = /** @type {Error} */ (failure);
    }
  }
  return { data, error, reload, path };
}
