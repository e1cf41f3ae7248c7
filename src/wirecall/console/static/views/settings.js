/** Settings: of this browser, and those that the server runs with. */

import { document_of, post } from "../api.js";
import { html, nothing } from "../lit-html.js";
import { end, role } from "../session.js";
import { signal } from "../store.js";
import { visible, zone } from "../text.js";
import { loaded, tell } from "../ui.js";

/**
 * Use a theme; null follows the system.
 * @param {string | null} theme
 */
export function applied(theme) {
  if (theme) {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("wc-theme", theme);
  } else {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("wc-theme");
  }
  document.documentElement.dataset.density = localStorage.getItem("wc-density") ?? "narrow";
}

/** @returns {import("../app.js").Page} */
export function open() {
  const found = document_of(() => "/settings.json");
  const turn = signal(0);
  void found.reload();

  /**
   * @param {string} name
   * @param {string} value
   */
  function keep(name, value) {
    if (value) localStorage.setItem(name, value);
    else localStorage.removeItem(name);
    if (name === "wc-theme") applied(value || null);
    if (name === "wc-zone") zone.isUtc = value === "utc";
    applied(localStorage.getItem("wc-theme"));
    turn.value += 1;
  }

  /**
   * @param {string} name
   * @param {string} word
   * @param {[string, string][]} choices
   */
  function select(name, word, choices) {
    const current = localStorage.getItem(name) ?? "";
    return html`<div class="field"><label for=${name}>${word}</label>
      <select id=${name} @change=${(/** @type {any} */ event) => keep(name, event.target.value)}>
        ${choices.map(([value, text]) => html`<option value=${value} ?selected=${value === current}>${text}</option>`)}</select></div>`;
  }

  /** @param {boolean} paused */
  async function pause(paused) {
    try {
      await post("/capture", { paused });
      await found.reload();
    } catch (error) {
      tell(/** @type {Error} */ (error).message);
    }
  }

  /** @param {any} data */
  function page(data) {
    void turn.value;
    return html`<h1 tabindex="-1">Settings</h1>
      <section><h2>This browser</h2>
        <div class="quarters">${select("wc-theme", "Theme", [["", "as the system"], ["light", "light"], ["dark", "dark"]])}
        ${select("wc-density", "Density", [["", "compact"], ["wide", "wide"]])}
        ${select("wc-zone", "Times", [["", "of this computer"], ["utc", "UTC"]])}
        ${select("wc-keys", "Single keys", [["", "on"], ["off", "off"]])}</div>
        <p class="actions"><button type="button" @click=${end}>Sign out</button>
          <span class="muted">You may ${role.value === "act" ? "look and act" : "look"}.</span></p>
      </section>
      <section><h2>Capture</h2>
        <p>${data.capture === "bodies" ? "Params and answers of the last calls are kept in memory, without secrets." : html`Only facts are kept: no params, no answers. <code>--capture bodies</code> keeps the last ones.`}</p>
        ${data.capture === "bodies" && role.value === "act" ? html`<button type="button" aria-pressed=${String(data.paused)} @click=${() => pause(!data.paused)}>
          ${data.paused ? "Continue to keep content" : "Pause keeping content"}</button>` : nothing}
      </section>
      <section><h2>Server</h2>
        <p>${visible(data.name)} ${visible(data.version ?? "")} · wirecall ${data.wirecall}</p>
        <div class="sideways" tabindex="0" role="region" aria-label="Effective configuration"><table class="rows settings"><caption class="quiet">Effective configuration</caption>
          <thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">From</th></tr></thead>
          <tbody>${data.values.map((/** @type {any} */ each) => html`<tr><td class="name">${each.name}</td>
            <td class="name">${visible(typeof each.value === "string" ? each.value : JSON.stringify(each.value))}</td><td>${visible(each.origin)}</td></tr>`)}</tbody></table></div>
        <p class="muted">The console cannot change these: edit wirecall.toml, then restart the server.</p>
      </section>`;
  }
  return { title: "Settings", json: () => "/settings.json", view: () => loaded(found, page) };
}
