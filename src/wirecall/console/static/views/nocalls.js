/** What the page of calls shows without a row: how to make the first one, and what a filter is. */

import { numbers } from "../feed.js";
import { html, nothing } from "../lit-html.js";
import { changed } from "../route.js";
import { number } from "../text.js";
import { command, empty } from "../ui.js";

/** @type {[string, string][]} */
const EXAMPLES = [
  ["status:error", "calls that failed"],
  ["replayed:yes", "answers from the ledger"],
  ["duration:>500ms", "slow calls"],
  ["kind:command since:10m", "commands of ten minutes"],
  ["method:ch* -caller:ada", "a pattern, and not one caller"],
];

/**
 * @param {any} document
 * @param {string} filter
 */
export function noCalls(document, filter) {
  if (filter && (document?.hidden || document?.total)) {
    return empty("No call fits this filter", html`
      <p>${number(document.hidden ?? document.total)} rows are hidden.
        <a href=${changed({ filter: null })}>Clear the filter</a></p>
      ${examples()}`);
  }
  const line = document?.first_call;
  return empty("Nothing has been called yet", html`
    <p>Calls appear here as they end. ${line ? "For a first one, in another terminal:" : nothing}</p>
    ${line ? command(line) : nothing}
    <p class="muted">${numbers.value ? "Connected, waiting…" : "Connecting…"}</p>
    ${examples()}`);
}

function examples() {
  return html`<h3>Filters</h3><ul class="examples">${EXAMPLES.map(
    ([text, meaning]) =>
      html`<li><a href=${changed({ filter: text })}><code>${text}</code></a> ${meaning}</li>`,
  )}</ul>`;
}
