// Handoffs, adapters, and the decision of a request.

import { $, Rows, put, seconds, whole } from "./dom.js";
import { call } from "./mesh.js";

const MOST_CANDIDATES = 60;
const ADAPTERS_EVERY = 5;

const milliseconds = (value) => `${whole(1000 * Number(value))} ms`;

export class Details {
  #snapshots = 0;

  constructor() {
    this.handoffs = new Rows($("handoffs"), [
      { name: "Request", text: (each) => each.request_id },
      { name: "Stage", text: (each) => each.stage },
      { name: "Cause", text: (each) => each.cause },
      { name: "From", text: (each) => each.sender || "–" },
      { name: "To", text: (each) => each.receiver || "–" },
      { name: "Tokens there", kind: "number", text: (each) => `${whole(each.present_tokens)} of ${whole(each.tokens)}` },
      { name: "Age", kind: "number", text: (each) => seconds(Number(each.age_ms)) },
      { name: "Expires in", kind: "number", text: (each) => seconds(each.expires_in_ms) },
    ], (each) => `${each.lease_id} ${each.request_id} ${each.batch_index} ${each.sequence_index}`, "No handoff is live.");
    this.adapters = new Rows($("adapters"), [
      { name: "Adapter", text: (each) => each.name || each.id },
      { name: "Version", text: (each) => each.version.slice(0, 12) },
      { name: "Model", text: (each) => each.model },
      { name: "Engines", text: (each) => each.workers.join(", ") || "–" },
      { name: "Pinned", text: (each) => (each.pinned ? "pinned" : "–") },
      { name: "Items", kind: "number", text: (each) => whole(sum(each.versions, "items")) },
      { name: "Found ready", kind: "number", text: (each) => whole(sum(each.versions, "hits")) },
    ], (each) => each.id, "No adapter is registered.");
    this.candidates = new Rows($("candidates"), [
      { name: "Engine", text: (each) => each.worker },
      { name: "Verdict", text: (each) => each.excluded_by ? `left out: ${each.excluded_by}` : each.verdict },
      { name: "Item", kind: "number", text: (each) => each.cause },
      { name: "Cost", kind: "number", text: (each) => (each.excluded_by ? "–" : milliseconds(each.score)) },
      { name: "Cached", kind: "number", text: (each) => `${whole(each.cached_tokens)} of ${whole(each.prompt_tokens)}` },
      { name: "Sequences", kind: "number", text: (each) => whole(each.sequences) },
      { name: "Wait", kind: "number", text: (each) => milliseconds(each.wait_seconds) },
      { name: "Step", kind: "number", text: (each) => milliseconds(each.step_seconds) },
    ], (each) => each.key, "Each placement leaves its decision; the router keeps the latest.");
  }

  show(snapshot) {
    this.handoffs.show(snapshot.handoffs.handoffs);
    if (this.#snapshots++ % ADAPTERS_EVERY === 0) {
      call("ListAdapters").then(({ adapters }) => this.adapters.show(adapters), () => {});
    }
  }

  async explain(request_id, owner = "") {
    const { placements } = await call("Explain", { request_id, owner });
    const rows = placements.reverse().flatMap((placement, at) => placement.candidates.map((candidate) => ({
      ...candidate,
      key: `${at} ${candidate.worker}`,
      prompt_tokens: placement.prompt_tokens,
      cause: `${placement.batch_index} (${placement.cause})`,
      verdict: candidate.worker === placement.worker ? "chosen"
        : candidate.worker === placement.prefill_worker ? "chosen for the prompt" : "not chosen",
    })));
    this.candidates.show(rows.slice(0, MOST_CANDIDATES));
    const [{ policy, split_reason }] = placements;
    put($("candidates").caption, `${request_id}, the latest placement first: policy ${policy}${split_reason && `; ${split_reason}`}`);
    $("explained").value = request_id;
    $("why").focus();
  }
}

const sum = (versions, name) => versions.reduce((total, each) => total + Number(each[name]), 0);
