// The live requests of a snapshot, a page at a time.

import { $, Rows, action, drawState, put, seconds, whole } from "./dom.js";
import { call } from "./mesh.js";

const PAGE = 20;
const STALLED_SECONDS = 2;

// Names have no line ends.
const keyOf = (request) => `${request.owner}\n${request.request_id}`;
const sequencesOf = (request) => request.items.flatMap((item) => item.sequences);
const tokensOf = (request) => request.items.reduce((total, item) => total + item.generated_tokens, 0);

export class Streams {
  #page = 0;
  #requests = [];

  constructor(rates, perform, explain) {
    this.rates = rates;
    this.perform = perform;
    this.explain = explain;
    this.rows = new Rows($("requests"), [
      { name: "Request", kind: "id", text: (request) => request.request_id },
      { name: "State", draw: (cell, request) => drawState(cell, stageOf(request)) },
      { name: "Engine", text: enginesOf },
      { name: "Age", kind: "number", text: (request) => seconds(Number(request.age_ms)) },
      { name: "Prompt", kind: "number", text: (request) =>
        whole(request.items.reduce((total, item) => total + item.prompt_tokens, 0)) },
      { name: "Tokens", kind: "number", text: (request) => whole(tokensOf(request)) },
      { name: "Tokens/s", kind: "number", text: ({ speed }) => (speed.rate === null ? "–" : whole(speed.rate)) },
      { name: "Unread", kind: "number", text: unread },
      { name: "Owner", text: (request) => request.owner },
      { name: "Change", kind: "change", draw: (cell, request) => this.#drawActions(cell, request) },
    ], keyOf, "No request is live.");
    $("earlier").addEventListener("click", () => this.#turn(-1));
    $("later").addEventListener("click", () => this.#turn(1));
  }

  show(snapshot) {
    this.#requests = snapshot.requests.requests;
    this.#requests.forEach((request, at) => {
      request.speed = this.rates.count(`request ${keyOf(request)}`, tokensOf(request));
      request.all_items = snapshot.items[at];
    });
    this.live = snapshot.requests.live_requests;
    this.#turn(0);
  }

  #turn(by) {
    const last = Math.max(0, Math.ceil(this.#requests.length / PAGE) - 1);
    this.#page = Math.min(last, Math.max(0, this.#page + by));
    const from = this.#page * PAGE;
    const shown = this.#requests.slice(from, from + PAGE);
    this.rows.show(shown);
    $("pages").hidden = this.live <= PAGE;
    $("earlier").ariaDisabled = this.#page === 0 ? "true" : null;
    $("later").ariaDisabled = this.#page === last ? "true" : null;
    put($("page"), `${from + 1} to ${from + shown.length} of ${whole(this.live)}`);
  }

  #drawActions(cell, request) {
    const offered = this.perform.allowed ? "all" : "explain";
    if (cell.dataset.offered === offered) return;
    cell.dataset.offered = offered;
    const { request_id, owner } = request;
    const explain = action("Explain", () => this.explain(request_id, owner));
    const move = action("Move", () => this.perform(`${request_id} moves`, () => moved(request_id, owner)));
    const stop = action("Stop", () => this.perform(`${request_id} stops`, () => stopped(request_id, owner)), true);
    const buttons = offered === "all" ? [explain, move, stop] : [explain];
    for (const button of buttons) button.ariaLabel = `${button.textContent} ${request_id}`;
    cell.replaceChildren(...buttons);
  }
}

export const stopped = (request_id, owner = "") => call("StopRequest", { stop: { request_id }, owner });

export async function moved(request_id, owner = "") {
  const { moved_sequences, left_sequences } = await call("MoveRequest", { request_id, owner });
  if (!moved_sequences) throw new Error(left_sequences ? "no other engine has room" : "it runs on no engine");
}

function stageOf(request) {
  const stages = new Set(request.items.map((item) => item.stage));
  if (!stages.has("generate")) return stages.size === 1 ? [...stages][0] : "waiting";
  if (sequencesOf(request).every((each) => each.queued)) return "waiting";
  if (!tokensOf(request)) return "prompt";
  return request.speed.still >= STALLED_SECONDS && !Number(request.unread_ms) ? "stalled" : "running";
}

export function enginesOf(request) {
  const running = sequencesOf(request);
  const names = [...new Set(running.map((each) => each.worker).filter(Boolean))].join(", ");
  const moved = running.some((each) => each.moved) ? ", moved" : "";
  const items = request.all_items > 1 ? `, ${whole(request.all_items)} items` : "";
  return (names || "–") + moved + items;
}

function unread(request) {
  const waits = request.waiting_tokens;
  return waits ? `${whole(waits)} for ${seconds(Number(request.unread_ms))}` : "0";
}
