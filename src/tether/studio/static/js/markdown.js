// Markdown as elements. All text becomes text nodes, so a model cannot write markup. Nothing is fetched:
// an image is shown as its description, and a link as its text and its address.

import { h } from "./dom.js";
import { visible } from "./format.js";

const MAX_LENGTH = 30_000; // longer texts are shown as plain text
const MAX_DEPTH = 5;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(\S.*)$/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+ *(?::?-+:? *)?$/;

/** A text as paragraphs, lists, code and tables. */
export function markdown(text) {
  if (text.length > MAX_LENGTH) return [h("p", {}, visible(text))];
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = readBlock(lines, at, depth);
    if (block) found.push(block);
    at = next;
  }
  return found;
}

/** The block that starts at a line, and the line after it. */
function readBlock(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const words = heading[2].replace(/ +#* *$/, "");
    const level = Math.min(6, heading[1].length + 2);
    return [h("p", { class: "md-heading", role: "heading", "aria-level": level }, inline(words, 0)), at + 1];
  }
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (/^ {0,3}>/.test(line) && depth < MAX_DEPTH) return readQuote(lines, at, depth);
  if (ITEM.test(line) && depth < MAX_DEPTH) return readList(lines, at, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) return readTable(lines, at);
  return readParagraph(lines, at);
}

function readCode(lines, at, fence) {
  const [mark] = fence[1];
  let end = at + 1;
  const closes = (line) => {
    const words = line.trim();
    return words.length >= fence[1].length && words === mark.repeat(words.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = h("pre", { tabindex: 0, "aria-label": "Code" }, h("code", {}, visible(lines.slice(at + 1, end).join("\n"))));
  return [h("div", { class: "md-code" }, fence[2] && h("small", {}, visible(fence[2])), code), end + 1];
}

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [h("blockquote", {}, blocks(inside, depth + 1)), end];
}

/** A list: items with the indent of the first one, each with the deeper lines that follow it. */
function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const numbered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent) {
      if (item[1].length < indent || /\d/.test(item[2]) !== numbered) break;
      items.push([item[3]]);
    } else if (!lines[end].trim()) {
      const after = lines[end + 1] ?? "";
      const goes = after.startsWith(" ".repeat(indent + 2)) || (ITEM.exec(after)?.[1].length ?? -1) >= indent;
      if (!goes) break;
      items.at(-1).push("");
    } else if (lines[end].startsWith(" ".repeat(indent + 1))) {
      items.at(-1).push(lines[end].slice(Math.min(indent + 2, lines[end].length - lines[end].trimStart().length)));
    } else break;
  }
  const made = items.map((inside) => h("li", {}, blocks(inside, depth + 1)));
  const start = numbered ? Number.parseInt(first[2], 10) : null;
  return [h(numbered ? "ol" : "ul", numbered && start !== 1 ? { start } : {}, made), end];
}

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const cells = (line) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .map((cell) => inline(cell.trim(), 0));
  const head = cells(lines[at]).map((cell) => h("th", {}, cell));
  const body = lines.slice(at + 2, end).map((line) => h("tr", {}, cells(line).map((cell) => h("td", {}, cell))));
  const table = h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
  return [h("div", { class: "wide", tabindex: 0 }, table), end];
}

function readParagraph(lines, at) {
  let end = at + 1;
  const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return [h("p", {}, inline(lines.slice(at, end).join("\n"), 0)), end];
}

// -- inside a line ------------------------------------------------------------------------------------------------

const PAIRS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "s"],
  ["*", "em"],
  ["_", "em"],
];

/** Code, emphasis, links and images of a line, as nodes. */
function inline(text, depth) {
  const found = [];
  let plain = "";
  const put = (node) => {
    if (plain) found.push(visible(plain));
    plain = "";
    if (node) found.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const read = depth < MAX_DEPTH && readInline(text, at, depth);
    if (read) {
      put(read[0]);
      at = read[1];
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  put(null);
  return found;
}

function readInline(text, at, depth) {
  const sign = text[at];
  if (sign === "`") return readCodeSpan(text, at);
  if (sign === "[" || (sign === "!" && text[at + 1] === "[")) return readLink(text, at, depth);
  if (!"*_~".includes(sign)) return null;
  for (const [mark, tag] of PAIRS) {
    if (!text.startsWith(mark, at)) continue;
    const start = at + mark.length;
    const end = text.indexOf(mark, start + 1);
    if (end < 0 || /\s/.test(text[start]) || /\s/.test(text[end - 1])) continue;
    if (mark[0] === "_" && (isWord(text[at - 1]) || isWord(text[end + mark.length]))) continue; // snake_case
    if (mark === "*" && text[end + 1] === "*") continue;
    return [h(tag, {}, inline(text.slice(start, end), depth + 1)), end + mark.length];
  }
  return null;
}

function isWord(sign) {
  return sign !== undefined && /[\p{L}\p{N}_]/u.test(sign);
}

function readCodeSpan(text, at) {
  let size = 1;
  while (text[at + size] === "`") size += 1;
  const mark = "`".repeat(size);
  const end = text.indexOf(mark, at + size);
  if (end < 0) return [document.createTextNode(mark), at + size];
  return [h("code", {}, visible(text.slice(at + size, end).trim())), end + size];
}

/** [text](address) and ![text](address): both are shown as text, without a link. */
function readLink(text, at, depth) {
  const isImage = text[at] === "!";
  const start = at + (isImage ? 2 : 1);
  const middle = text.indexOf("](", start);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  const inside = text.slice(start, middle);
  const address = text.slice(middle + 2, end);
  if (end < 0 || inside.includes("[") || /\n/.test(address) || inside.length > 1000) return null;
  const words = isImage ? [`image: ${visible(inside) || "no description"}`] : inline(inside, depth + 1);
  return [h("span", { class: isImage ? "md-image" : "md-link" }, words, " ", h("small", {}, visible(address))), end + 1];
}
