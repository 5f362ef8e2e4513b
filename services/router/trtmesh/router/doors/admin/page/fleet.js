// Engines, tokenizers and the totals of a snapshot.

import { $, Rows, action, drawBar, drawCourse, drawState, element, put, whole } from "./dom.js";
import { call } from "./mesh.js";

const word = (value, prefix) => value.slice(prefix.length).toLowerCase();
// A replica that had a name was there before: the router looks for it again.
export function stateOf(replica) {
  const state = word(replica.state, "WORKER_STATE_");
  return state === "gone" || (state === "connecting" && (replica.worker || replica.fingerprint)) ? "lost" : state;
}
export const nameOf = (worker) => worker.worker || worker.address;
const roleOf = (worker) => {
  const present = worker.load?.role ?? "WORKER_ROLE_UNSPECIFIED";
  return word(present === "WORKER_ROLE_UNSPECIFIED" ? worker.engine?.role ?? present : present, "WORKER_ROLE_");
};
const load = (worker, name) => Number(worker.load?.[name] ?? 0);

export class Fleet {
  #states = new Map();
  #generated = 0;

  constructor(rates, perform, changed) {
    this.rates = rates;
    this.perform = perform;
    this.changed = changed;
    this.workers = new Rows($("workers"), [
      { name: "Engine", text: nameOf },
      { name: "State", draw: (cell, worker) => drawState(cell, stateOf(worker)) },
      { name: "Role", draw: (cell, worker) => this.#drawRole(cell, worker) },
      { name: "Model", text: (worker) => worker.engine?.model ?? "" },
      { name: "Running", kind: "number", text: (worker) => whole(load(worker, "running_sequences")) },
      { name: "Waiting", kind: "number", text: (worker) => whole(load(worker, "waiting_sequences")) },
      { name: "KV used", kind: "number",
        draw: (cell, worker) => drawBar(cell, load(worker, "used_blocks"), load(worker, "total_blocks")) },
      { name: "KV reuse", kind: "number", text: (worker) => reuse([worker]) },
      { name: "Tokens/s", kind: "number", draw: (cell, { speed }) =>
        drawCourse(cell, speed.rate === null ? "–" : whole(speed.rate), speed.course) },
      { name: "Adapters", kind: "number", text: slots },
      { name: "Problem", kind: "problem", text: (worker) => worker.problem },
      { name: "Change", kind: "change", draw: (cell, worker) => this.#drawActions(cell, worker) },
    ], (worker) => worker.address, "No engine is known.");
    this.tokenizers = new Rows($("tokenizers"), [
      { name: "Tokenizer", text: (each) => each.address },
      { name: "State", draw: (cell, each) => drawState(cell, stateOf(each)) },
      { name: "Model", text: (each) => each.model },
      { name: "Sequences", kind: "number", text: (each) => whole(each.sequences) },
      { name: "Problem", kind: "problem", text: (each) => each.problem },
    ], (each) => each.address, "No tokenizer is known.");
  }

  show(snapshot) {
    const { workers, tokenizers } = snapshot.fleet;
    for (const worker of workers) {
      worker.speed = this.rates.count(`worker ${worker.address} ${worker.engine?.instance}`, load(worker, "generated_tokens"));
    }
    this.#tellChanges([...workers.map((each) => [`engine ${nameOf(each)}`, each]),
      ...tokenizers.map((each) => [`tokenizer ${each.address}`, each])]);
    this.workers.show(workers);
    this.tokenizers.show(tokenizers);
    this.#showTotals(snapshot, workers);
  }

  #tellChanges(replicas) {
    const seen = new Map();
    for (const [name, replica] of replicas) {
      const state = stateOf(replica);
      const before = this.#states.get(name);
      if (this.#states.size && before !== state) this.changed(`${name} is ${state}`, replica.problem);
      seen.set(name, state);
    }
    for (const name of this.#states.keys()) if (!seen.has(name)) this.changed(`${name} left`, "");
    this.#states = seen;
  }

  #showTotals(snapshot, workers) {
    const sum = (name) => workers.reduce((total, worker) => total + load(worker, name), 0);
    this.#generated += workers.reduce((total, { speed }) => total + speed.grown, 0);
    const speed = this.rates.count("all", this.#generated);
    const ready = workers.filter((worker) => stateOf(worker) === "ready").length;
    const total = (name, draw) => {
      let cell = $(`total-${name.replaceAll(" ", "-")}`);
      if (!cell) {
        cell = element("dd", { id: `total-${name.replaceAll(" ", "-")}` });
        $("totals").append(element("div", {}, element("dt", { textContent: name }), cell));
      }
      draw(cell);
    };
    const text = (told) => (cell) => put(cell, told);
    total("Tokens/s", (cell) => drawCourse(cell, speed.rate === null ? "–" : whole(speed.rate), speed.course));
    total("Engines ready", text(`${ready} of ${workers.length}`));
    total("Live requests", text(whole(snapshot.fleet.live_requests)));
    total("Running", text(whole(sum("running_sequences"))));
    total("Waiting", text(whole(sum("waiting_sequences"))));
    total("KV used", (cell) => drawBar(cell, sum("used_blocks"), sum("total_blocks")));
    total("KV reuse", text(reuse(workers)));
    total("Placement", text(snapshot.fleet.policy));
  }

  #drawRole(cell, worker) {
    const role = roleOf(worker);
    const roles = (worker.engine?.roles ?? []).map((each) => word(each, "WORKER_ROLE_"));
    if (!this.perform.allowed || roles.length < 2) {
      put(cell, role);
      return;
    }
    if (!cell.querySelector("select")) {
      const choice = element("select", { ariaLabel: `Role of ${nameOf(worker)}` }, ...roles.map((each) => new Option(each)));
      const set = action("Set", async () => {
        await this.perform(`${nameOf(worker)} becomes ${choice.value}`, () =>
          call("SetWorkerRole", { worker: worker.address, role: `WORKER_ROLE_${choice.value.toUpperCase()}` }));
        set.hidden = true;
      });
      // Arrow keys change the choice on their way to another.
      choice.addEventListener("change", () => { set.hidden = false; });
      set.hidden = true;
      cell.replaceChildren(choice, " ", set);
    }
    const [choice, set] = cell.children;
    if (set.hidden && document.activeElement !== choice) choice.value = role;
  }

  #drawActions(cell, worker) {
    const state = stateOf(worker);
    const offered = !this.perform.allowed ? "" : { ready: "Drain", stalled: "Drain", draining: "Resume" }[state] ?? "";
    if (cell.dataset.offered === offered) return;
    cell.dataset.offered = offered;
    const name = nameOf(worker);
    const acts = {
      Drain: () => this.perform(`${name} drains, its sequences move`, () =>
        call("DrainWorker", { worker: worker.address, finish_ms: 0 })),
      Resume: () => this.perform(`${name} takes items again`, () => call("ResumeWorker", { worker: worker.address })),
    };
    const button = offered && action(offered, acts[offered], offered === "Drain");
    if (button) button.ariaLabel = `${offered} ${name}`;
    const focused = cell.contains(document.activeElement);
    cell.replaceChildren(...(button ? [button] : []));
    if (focused && button) button.focus();
  }
}

function slots(worker) {
  const all = load(worker, "adapter_slots");
  return all ? `${all - load(worker, "free_adapter_slots")} of ${all}` : "–";
}

function reuse(workers) {
  const reused = workers.reduce((total, worker) => total + load(worker, "reused_prompt_tokens"), 0);
  const all = reused + workers.reduce((total, worker) => total + load(worker, "computed_prompt_tokens"), 0);
  return all ? `${Math.round(100 * reused / all)}%` : "–";
}
