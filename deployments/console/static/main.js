// The frame: pages by the address's fragment, the key, the theme.

import { apiKey, setApiKey } from "./api.js";
import { announce, fill, h } from "./dom.js";
import { generatePage } from "./generate_page.js";
import { cachePage, poolsPage } from "./live_pages.js";
import { experimentsPage } from "./experiments_page.js";
import { methodsPage } from "./methods_page.js";
import { tenantPage } from "./tenant_page.js";
import { decode } from "./share.js";

const PAGES = {
  generate: ["Generate", generatePage],
  pools: ["Pools", poolsPage],
  cache: ["Cache", cachePage],
  methods: ["Methods", methodsPage],
  tenant: ["Tenant", tenantPage],
  experiments: ["Experiments", experimentsPage],
};
const THEME = "turnout-theme";
const root = document.getElementById("page");
let close = () => {};
let shown = 0;

async function show() {
  const [name, query] = location.hash.replace(/^#\//, "").split("?");
  const known = Object.hasOwn(PAGES, name) ? name : "generate";
  const [title, open] = PAGES[known];
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.dataset.page === known) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown) announce(`${title} page.`);
  document.title = `${title} · Turnout`;
  close();
  close = () => {};
  const mine = ++shown;
  const box = h("div", {});
  fill(root, h("p", { class: "quiet" }, "Loading…"));
  try {
    const done = await open(box, decode(new URLSearchParams(query).get("state") ?? ""));
    if (mine !== shown) return void done?.();
    close = done ?? close;
    fill(root, box);
  } catch (error) {
    if (mine !== shown) return;
    if (error.status === undefined) console.error(error);
    fill(root, h("h1", {}, title), h("p", { class: "alert", role: "alert" }, error.message),
      h("button", { type: "button", onclick: show }, "Try again"));
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  if (document.getElementById("key")) return;
  const input = h("input", {
    type: "password", id: "key", autocomplete: "off", spellcheck: "false", value: apiKey(), "aria-describedby": "key-help",
  });
  const dialog = h("dialog", { "aria-labelledby": "key-title", onclose: () => dialog.remove() },
    h("form", {
      onsubmit: (event) => { event.preventDefault(); setApiKey(input.value.trim()); mark(); dialog.close(); show(); },
    },
      h("h2", { id: "key-title" }, "API key"),
      h("div", { class: "field" }, h("label", { for: "key" }, "Key"), input,
        h("p", { class: "help", id: "key-help" }, "Kept in this tab only, until it is closed. Empty: none is sent.")),
      h("div", { class: "buttons" }, h("button", { class: "main" }, "Use it"),
        h("button", { type: "button", onclick: () => dialog.close() }, "Leave it"))));
  document.body.append(dialog);
  dialog.showModal();
}

const keyButton = h("button", { type: "button", onclick: askForKey });
const themeButton = h("button", { type: "button", onclick: turnTheme });

function mark() { keyButton.textContent = apiKey() ? "Key: set" : "Key"; }

function theme() { return localStorage.getItem(THEME) ?? "auto"; }

function turnTheme() {
  const order = ["auto", "light", "dark"];
  localStorage.setItem(THEME, order[(order.indexOf(theme()) + 1) % order.length]);
  setTheme();
}

function setTheme() {
  document.documentElement.dataset.theme = theme();
  themeButton.textContent = `Theme: ${theme()}`;
  document.dispatchEvent(new Event("themechange"));
}

fill(document.getElementById("nav"), h("ul", {}, Object.entries(PAGES).map(([name, [title]]) =>
  h("li", {}, h("a", { href: `#/${name}`, "data-page": name }, title)))));
fill(document.getElementById("tools"), keyButton, themeButton);
mark();
setTheme();
document.addEventListener("keyneeded", askForKey);
// By hand: an address of its own would take the place of the page's.
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); root.focus(); });
addEventListener("hashchange", show);
show();
