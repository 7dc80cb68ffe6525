// The settings dialog: sampling, policy, system message, theme and API key.
import { $, make, store, stored } from "./basics.js";

const NUMBERS = {
  "temperature": "temperature", "top-p": "top_p", "top-k": "top_k", "min-p": "min_p",
  "repetition": "repetition_penalty", "seed": "seed", "most": "max_tokens",
};
const KEPT = [...Object.keys(NUMBERS), "system", "policy", "policy-options", "theme"];

let own = ""; // the server's policy

export function system() { return $("system").value.trim(); }

// Whether requests name a policy other than the server's. Such requests cannot use a session.
export function otherPolicy() { return $("policy").value !== own && $("policy").value !== ""; }

// Fields of a request. Raises SyntaxError for policy options that are not JSON.
export function fields() {
  const body = {};
  for (const [id, name] of Object.entries(NUMBERS)) if ($(id).value !== "") body[name] = Number($(id).value);
  if (!otherPolicy()) return body;
  const options = $("policy-options").value.trim();
  return { ...body, policy: $("policy").value, ...(options && { policy_options: JSON.parse(options) }) };
}

// Offer the policies of the server.
export function offer({ policy, policies }) {
  own = policy;
  const wanted = saved().policy;
  $("policy").replaceChildren(...policies.map((name) => {
    const option = make("option", name === own ? `${name} (of the server)` : name);
    option.value = name;
    return option;
  }));
  $("policy").value = policies.includes(wanted) ? wanted : own;
  $("policy").disabled = policies.length === 1;
  $("policy-text").textContent = policies.length === 1 ? "Start the server with --max-engines 2 to choose another policy here."
    : "Another policy than the server's keeps no KV on disk.";
  changed();
}

function saved() {
  try { return JSON.parse(stored("settings")) || {}; } catch { return {}; }
}

function changed() {
  $("policy-options").disabled = !otherPolicy();
  const theme = $("theme").value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function keep() {
  changed();
  store("settings", JSON.stringify(Object.fromEntries(KEPT.map((id) => [id, $(id).value]))));
}

function begin() {
  for (const [id, value] of Object.entries(saved())) if (KEPT.includes(id) && id !== "policy") $(id).value = value;
  for (const id of KEPT) $(id).addEventListener("change", keep);
  try { $("key").value = sessionStorage.getItem("offload-rt key") || ""; } catch { /* no storage */ }
  $("settings-open").addEventListener("click", open);
  $("settings-close").addEventListener("click", () => $("settings").close());
  $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
  $("defaults").addEventListener("click", () => {
    for (const id of KEPT) $(id).value = $(id).defaultValue ?? "";
    $("policy").value = own;
    keep();
  });
  changed();
}

export function open() { if (!$("settings").open) $("settings").showModal(); }

begin();
