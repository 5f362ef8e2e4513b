// Joins the panels, the looks and the rights of the viewer.

import { $, element, put } from "./dom.js";
import { Fleet } from "./fleet.js";
import { follow, token } from "./mesh.js";
import { Rates } from "./rates.js";
import { Streams } from "./streams.js";

const MOST_CHANGES = 20;
const SILENT_MS = 3000;

const rates = new Rates();
let guarded = true;
let following = new AbortController();
let lastLook = 0;

// Changes something and tells how it went. `perform.allowed` says whether the viewer may.
async function perform(what, change) {
  put($("told"), `${what} …`);
  try {
    const answer = await change();
    put($("told"), `${what}: done`);
    return answer;
  } catch (error) {
    put($("told"), `${what}: ${error.message}`);
    return null;
  }
}
perform.allowed = false;

function changed(what, why) {
  const told = why ? `${what}: ${why}` : what;
  const time = new Date().toLocaleTimeString("en-GB");
  $("changes").prepend(element("li", {}, element("time", { textContent: time }), ` ${told}`));
  while ($("changes").children.length > MOST_CHANGES) $("changes").lastChild.remove();
}

const panels = [
  new Fleet(rates, perform, changed),
  new Streams(rates, perform, () => {}),
];

function onLook(look) {
  lastLook = performance.now();
  guarded = look.guarded;
  showRights();
  put($("router"), look.router);
  showLink(look.fleet.draining ? "draining" : "ready", look.fleet.draining ? "the router drains" : "live");
  rates.begin(look.time);
  for (const panel of panels) panel.show(look);
}

function onProblem(status, reason) {
  if (status === 401 && token.get()) {
    token.set("");
    put($("told"), `The token was refused: ${reason}`);
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
  put($("rights"), perform.allowed ? "You may change things" : "Read-only");
}

function restart() {
  following.abort();
  following = new AbortController();
  follow(onLook, onProblem, following.signal);
}

$("admin").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set($("token").value.trim());
  $("token").value = "";
  restart();
});
$("forget").addEventListener("click", () => { token.set(""); restart(); });
setInterval(() => {
  const silent = performance.now() - lastLook;
  if (lastLook && silent > SILENT_MS) showLink("stalled", `no look for ${Math.round(silent / 1000)} s`);
}, 1000);
restart();
