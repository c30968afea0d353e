// Answer texts in Node: node node/classify.mjs MODEL "a text" "another"
import path from "node:path";
import { open } from "../classifier.mjs";

const [model, ...texts] = process.argv.slice(2);
if (!texts.length) {
  console.error('type: node node/classify.mjs MODEL "a text" "another"');
  process.exit(2);
}
const { classify } = await open(path.dirname(path.resolve(model)) + path.sep, path.basename(model));
for (const text of texts) console.log(JSON.stringify({ text, ...(await classify(text)) }));
