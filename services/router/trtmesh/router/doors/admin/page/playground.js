// Chats with a model, shows how sure it was of each token, and stops or moves the stream while it runs.

import { $, Rows, action, drawBar, element, put, whole } from "./dom.js";
import { events, headers, problemOf } from "./mesh.js";
import { enginesOf, moved, stopped } from "./streams.js";

const TOPS = 5;
const SURE = [0.5, 0.9];

const percent = (log_prob) => `${(100 * Math.exp(log_prob)).toFixed(1)}%`;
const quoted = (text) => `“${text.replaceAll("\n", "⏎")}”`;

export class Playground {
  #id = "";
  #runs = false;

  constructor(perform, explain) {
    this.perform = perform;
    this.tops = new Rows($("tops"), [
      { name: "Token", kind: "id", text: (each) => quoted(each.token) },
      { name: "Log-probability", kind: "number", text: (each) => each.logprob.toFixed(3) },
      { name: "Probability", kind: "number", draw: (cell, each) => drawBar(cell, Math.exp(each.logprob), 1, percent(each.logprob)) },
    ], (each) => each.key, "");
    this.tops.show([]);
    const stop = action("Stop", () => perform("the answer stops", () => stopped(this.#id)));
    const move = action("Move", () => perform("the answer moves to another engine", () => moved(this.#id)));
    const why = action("Explain", () => explain(this.#id));
    $("running").append(stop, move, why, element("span"));
    $("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    const answer = $("answer");
    for (const kind of ["pointerover", "focusin"]) answer.addEventListener(kind, ({ target }) => this.#showTops(target));
    answer.addEventListener("keydown", ({ key, target }) => {
      const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[key];
      target[next]?.focus();
    });
  }

  show(snapshot) {
    const why = !snapshot.playground ? "The router serves no HTTP." : this.perform.allowed ? "" : "It needs the admin token.";
    $("no-playground").hidden = !why;
    put($("no-playground"), why);
    $("chat").hidden = Boolean(why);
    $("key-field").hidden = !snapshot.needs_key;
    const models = [...new Set(snapshot.fleet.workers.map((each) => each.engine?.model).filter(Boolean))];
    const known = [...$("model").options].map((each) => each.value);
    if (models.join() !== known.join()) $("model").replaceChildren(...models.map((each) => new Option(each)));
    const live = snapshot.requests.requests.find((each) => each.request_id === this.#id);
    put($("running").lastChild, live ? `on ${enginesOf(live)}` : "");
  }

  async #send() {
    if (this.#runs) return;
    this.#runs = true;
    this.#id = `console-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    const answer = $("answer");
    answer.replaceChildren();
    answer.ariaBusy = "true";
    this.tops.show([]);
    put($("said"), "running");
    put($("running").lastChild, "");
    $("running").hidden = false;
    $("send").ariaDisabled = "true";
    let ended = "";
    try {
      ended = await this.#stream();
    } catch (error) {
      ended = error.message;
    }
    answer.ariaBusy = "false";
    const tokens = [...answer.children].filter((each) => each.token).length;
    put($("said"), `${tokens ? `${whole(tokens)} tokens, ` : ""}ended: ${ended}`);
    $("send").ariaDisabled = null;
    this.#runs = false;
  }

  async #stream() {
    const asked = {
      model: $("model").value,
      messages: [{ role: "user", content: $("message").value }],
      max_tokens: Number($("most").value),
      temperature: Number($("temperature").value),
      stream: true,
      ...($("scored").checked && { logprobs: true, top_logprobs: TOPS }),
    };
    const key = $("key").value && { "X-API-Key": $("key").value };
    const named = headers({ "Content-Type": "application/json", "X-Request-Id": this.#id, ...key });
    const response = await fetch("console/v1/chat/completions", { method: "POST", headers: named, body: JSON.stringify(asked) });
    if (!response.ok) return problemOf(response);
    const bytes = new TextDecoder();
    let ended = "the connection broke";
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const { choices, error } = JSON.parse(data);
      if (error) return error.message;
      const [choice] = choices;
      this.#add(choice.delta.content ?? choice.delta.reasoning ?? "", choice.logprobs?.content ?? [], bytes);
      ended = choice.finish_reason ?? ended;
    }
    return ended;
  }

  // Adds text a token at a time, where the tokens are known and are that text.
  #add(text, tokens, decoder) {
    const texts = tokens.map(({ bytes }) => decoder.decode(new Uint8Array(bytes ?? []), { stream: true }));
    const known = texts.join("") === text;
    const parts = known ? texts.map((each, at) => [each, tokens[at]]) : [[text, tokens.at(-1)]];
    for (const [part, token] of parts) {
      if (!part && !token) continue;
      const made = element("span", { textContent: part, tabIndex: $("answer").firstChild ? -1 : 0 });
      if (token) {
        made.token = token;
        const sure = Math.exp(token.logprob);
        made.className = !part.trim() ? "" : sure < SURE[0] ? "unsure" : sure < SURE[1] ? "less-sure" : "";
      }
      $("answer").append(made);
    }
  }

  #showTops({ token }) {
    if (!token) return;
    put($("tops").caption, `${quoted(token.token)} had ${percent(token.logprob)}`);
    this.tops.show(token.top_logprobs.map((each, key) => ({ ...each, key })));
  }
}
