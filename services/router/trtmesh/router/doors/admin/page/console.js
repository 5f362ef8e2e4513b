// Joins the panels, the snapshots and the rights of the viewer.

import { Details } from "./details.js";
import { $, element, put } from "./dom.js";
import { Fleet } from "./fleet.js";
import { follow, token } from "./mesh.js";
import { Playground } from "./playground.js";
import { Rates } from "./rates.js";
import { Streams } from "./streams.js";

const MOST_CHANGES = 20;
const SILENT_MS = 3000;
const TELL_MS = 8000;

const rates = new Rates();
let guarded = true;
let following = new AbortController();
let lastSnapshot = 0;

// Changes something and tells how it went. `perform.allowed` says whether the viewer may.
async function perform(what, change) {
  tell(`${what} …`);
  try {
    await change();
    tell(`${what}: done`);
  } catch (error) {
    tell(`${what}: ${error.message}`);
  }
}
perform.allowed = false;

let telling = 0;
function tell(text) {
  put($("told"), text);
  clearTimeout(telling);
  telling = setTimeout(() => put($("told"), ""), TELL_MS);
}

function changed(what, why) {
  const told = why ? `${what}: ${why}` : what;
  const time = new Date().toLocaleTimeString("en-GB");
  $("changes").prepend(element("li", {}, element("time", { textContent: time }), ` ${told}`));
  while ($("changes").children.length > MOST_CHANGES) $("changes").lastChild.remove();
}

const details = new Details();
const explain = (id, owner) => details.explain(id, owner).catch((error) => tell(error.message));
$("explain").addEventListener("submit", (event) => {
  event.preventDefault();
  explain($("explained").value);
});
const panels = [
  new Fleet(rates, perform, changed), new Streams(rates, perform, explain), new Playground(perform, explain), details,
];

function onSnapshot(snapshot) {
  lastSnapshot = performance.now();
  guarded = snapshot.guarded;
  showRights();
  put($("router"), snapshot.router);
  showLink(snapshot.fleet.draining ? "draining" : "ready", snapshot.fleet.draining ? "the router drains" : "live");
  rates.begin(snapshot.time);
  for (const panel of panels) panel.show(snapshot);
}

function onProblem(status, reason) {
  if (status === 401 && token.get()) {
    token.set("");
    tell(`The token was refused: ${reason}`);
  }
  showRights();
  showLink("lost", reason);
}

function showLink(state, told) {
  $("link").dataset.state = state;
  put($("link"), told);
}

function showRights() {
  perform.allowed = !guarded || Boolean(token.get());
  $("admin").hidden = perform.allowed;
  $("forget").hidden = !token.get();
  put($("rights"), !guarded ? "no admin token is set: everyone may change things"
    : perform.allowed ? "you may change things" : "read-only");
}

function restart() {
  following.abort();
  following = new AbortController();
  follow(onSnapshot, onProblem, following.signal);
}

$("admin").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("token").value.trim());
  $("token").value = "";
  restart();
});
$("forget").addEventListener("click", () => { token.set(""); restart(); });
document.addEventListener("visibilitychange", () => (document.hidden ? following.abort() : restart()));
setInterval(() => {
  if (lastSnapshot && performance.now() - lastSnapshot > SILENT_MS) showLink("stalled", "the router is silent");
}, 1000);
restart();
