// A classifier that says which tokens it kept, in transformers.js: one file for Node and for browsers.
//
// The model is an output directory of: adtp-export MODEL_DIR --layout hub --debug-outputs
import { AutoConfig, AutoModel, AutoTokenizer, Tensor, env } from "@huggingface/transformers";

/**
 * Open a model.
 * @param {string} folder where models lie: a path in Node, an address in a browser; with a slash at its end.
 * @param {string} name of the model's folder in it.
 * @returns {Promise<object>} sites, where tokens are dropped, and classify(text), which answers with label, score, scores, tokens and
 *   droppedAt: for each token the site that dropped it, null where it stayed.
 */
export async function open(folder, name) {
  env.allowRemoteModels = false; // nothing is asked of the Hub
  env.allowLocalModels = true;
  env.useBrowserCache = false; // another export is seen at once
  env.localModelPath = folder;
  const device = globalThis.window ? "wasm" : "cpu";
  const [config, tokenizer, model] = await Promise.all([
    AutoConfig.from_pretrained(name),
    AutoTokenizer.from_pretrained(name),
    AutoModel.from_pretrained(name, { dtype: "fp32", device }), // the plain class, which gives all outputs
  ]);
  const { prune_sites: sites, max_tokens } = config.adtp;
  const labels = Object.values(config.id2label);
  // Of several labels each may hold or not, and so may a single one; else they exclude one another.
  const alone = config.problem_type === "multi_label_classification" || (labels.length === 1 && config.problem_type !== "regression");
  const tokens = new Map([...tokenizer.get_vocab()].map(([token, id]) => [id, token]));

  async function classify(text) {
    let ids = tokenizer.encode(text);
    if (ids.length > max_tokens) ids = [...ids.slice(0, max_tokens - 1), ids.at(-1)]; // truncation of the library's own loses [SEP]
    const inputs = { input_ids: row(ids), attention_mask: row(ids.map(() => 1)) };
    if (config.type_vocab_size > 1) inputs.token_type_ids = row(ids.map(() => 0));
    const { logits, kept_site } = await model(inputs);
    if (!kept_site) throw new Error("the model does not say which tokens it keeps; export it with --debug-outputs");
    const probabilities = (alone ? logistic : softmax)([...logits.data]);
    const score = Math.max(...probabilities);
    return {
      label: labels[probabilities.indexOf(score)],
      score,
      scores: Object.fromEntries(labels.map((label, i) => [label, probabilities[i]])),
      tokens: ids.map((id) => tokens.get(id)),
      droppedAt: [...kept_site.data].map((site) => sites[site] ?? null),
    };
  }
  return { sites, classify };
}

function row(numbers) {
  return new Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
}

function logistic(logits) {
  return logits.map((logit) => 1 / (1 + Math.exp(-logit)));
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}
