// The page: answers the text in its box, and shows what became of each token. ?model=NAME and ?text=... set them.
import { env } from "@huggingface/transformers";
import { open } from "../classifier.mjs";

const at = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
if (asked.has("text")) at("text").value = asked.get("text");
env.backends.onnx.wasm.wasmPaths = new URL("../node_modules/onnxruntime-web/dist/", location.href).href; // else from a CDN

try {
  const model = asked.get("model") ?? "student-export";
  const { sites, classify } = await open("../", model).catch((error) => {
    throw new Error(`The model ${model} cannot be opened; README.md says how to make it. ${error.message}`);
  });
  let busy = false;
  const answer = async () => {
    if (busy) return;
    busy = true;
    try {
      for (let text = null; text !== at("text").value; ) {
        text = at("text").value;
        show(await classify(text), sites); // what was typed meanwhile is answered next
      }
    } finally {
      busy = false;
    }
  };
  at("text").addEventListener("input", () => answer().catch(fail));
  await answer();
} catch (error) {
  fail(error);
}

function show({ label, score, tokens, droppedAt }, sites) {
  at("label").textContent = label;
  at("score").textContent = `${(100 * score).toFixed(1)}%`;
  at("answer").dataset.score = score;
  at("bar").style.width = `${100 * score}%`;
  at("tokens").replaceChildren(
    ...tokens.map((token, i) => {
      const item = document.createElement("li");
      item.textContent = token;
      item.title = droppedAt[i] === null ? "stays to the end" : `dropped at ${droppedAt[i]}`;
      if (droppedAt[i] !== null) item.dataset.dropped = droppedAt[i];
      item.className = droppedAt[i] === null ? "kept" : `dropped site-${Math.min(sites.indexOf(droppedAt[i]), 2)}`;
      return item;
    }),
  );
  let left = tokens.length;
  const rows = [["tokens read", left], ...sites.map((site) => [`left after ${site}`, (left -= droppedAt.filter((at) => at === site).length)])];
  at("counts").replaceChildren(
    ...rows.map(([name, count]) => {
      const row = document.createElement("tr");
      row.append(...[name, count, `${Math.round((100 * count) / tokens.length)}%`].map((text, i) => {
        const cell = document.createElement(i ? "td" : "th");
        cell.textContent = text;
        return cell;
      }));
      return row;
    }),
  );
}

function fail(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
  at("label").textContent = "no answer";
}
