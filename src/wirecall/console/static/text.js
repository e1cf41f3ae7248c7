/** How values become text. Payloads are hostile: control and bidi characters become visible. */

import { html } from "./lit-html.js";

/** Control characters, bidi controls, and characters without width. */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
/** Characters of a value that a page shows. */
export const MOST = 64 * 1024;

/**
 * @param {unknown} value
 * @returns {string}
 */
export function visible(value) {
  return String(value ?? "").replace(
    HIDDEN,
    (sign) => `⟦U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟧`,
  );
}

/**
 * A name in a row: visible, on one line, and cut.
 * @param {unknown} value
 * @param {number} [most]
 */
export function short(value, most = 80) {
  const text = visible(value).replace(/\s+/g, " ");
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** @param {number | null | undefined} ms */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 10) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(2)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

/** @param {number | null | undefined} seconds */
export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size < 1) return "now";
  if (size < 60) return `${Math.round(seconds)} s`;
  if (size < 3600) return `${Math.round(seconds / 60)} min`;
  if (size < 86_400) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** @param {number | null | undefined} count */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  if (count < 1024) return `${count} B`;
  if (count < 1024 * 1024) return `${(count / 1024).toFixed(1)} KB`;
  return `${(count / 1024 / 1024).toFixed(1)} MB`;
}

/** @param {number} value */
export function number(value) {
  return new Intl.NumberFormat("en").format(value);
}

/** @param {number} share */
export function percent(share) {
  if (!share) return "0 %";
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

/** Whether times are shown in UTC; the settings change it. */
export const zone = { isUtc: localStorage.getItem("wc-zone") === "utc" };

/**
 * @param {number | null | undefined} seconds since 1970
 * @param {boolean} [isLong] with the date
 */
export function time(seconds, isLong = false) {
  if (seconds === null || seconds === undefined) return html`<span>–</span>`;
  const moment = new Date(seconds * 1000);
  const options = /** @type {Intl.DateTimeFormatOptions} */ ({
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    hourCycle: "h23",
    fractionalSecondDigits: isLong ? undefined : 3,
    ...(isLong ? { year: "numeric", month: "2-digit", day: "2-digit" } : {}),
    ...(zone.isUtc ? { timeZone: "UTC" } : {}),
  });
  const text = new Intl.DateTimeFormat("sv-SE", options).format(moment).replace(",", ".");
  const exact = moment.toISOString();
  return html`<time datetime=${exact} title=${exact}>${text}</time>`;
}
