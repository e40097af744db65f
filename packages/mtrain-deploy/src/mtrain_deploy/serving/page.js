"use strict";
const $ = (id) => document.getElementById(id);
const LOWEST = 0.01; // asked for once; the slider then chooses among what was found
const SVG = "http://www.w3.org/2000/svg";
let model = null, result = null, turn = 0, pixels = null;

const percent = (value) => (value * 100).toFixed(value < 0.0995 && value > 0 ? 1 : 0) + "%";
const plural = (count, word) => count + " " + word + (count === 1 ? "" : "s");

// Boxes: steps of the golden angle around the hue circle. Masks: the palette of Pascal VOC. Both as mtrain draws them.
function colour(label) {
  if (model && model.task === "segmentation") {
    const [r, g, b] = palette(label);
    return `rgb(${r} ${g} ${b})`;
  }
  return `hsl(${((0.02 + label * 0.381966) % 1) * 360} 100% 57.5%)`;
}
function palette(label) {
  const colours = [0, 0, 0];
  for (let bit = 0; bit < 8; bit++) colours[bit % 3] |= ((label >> bit) & 1) << (7 - Math.floor(bit / 3));
  return colours;
}
function element(tag, parent, text) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function say(text, isBad) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", Boolean(isBad));
}

async function about() {
  try {
    model = await (await fetch("/v1/model")).json();
  } catch { say("The server does not answer.", true); return; }
  $("model").textContent = model.file || "mtrain serve";
  document.title = (model.file || "model") + " - mtrain serve";
  const size = model.image_size ? `, input ${model.image_size} px` : "";
  $("about").textContent = `${model.model}, ${model.task} of ${model.class_names.length} ${model.class_names.length === 1 ? "class" : "classes"}${size}, ${model.precision}`;
  $("hint").textContent = `JPEG, PNG, WebP or BMP, up to ${model.limits.body_bytes / 1e6} MB`;
}

async function look(file) {
  const mine = ++turn;
  if (model === null) await about();
  const limit = model && model.limits.body_bytes;
  if (limit && file.size > limit) {
    say(`${file.name}: ${(file.size / 1e6).toFixed(1)} MB, more than the ${limit / 1e6} MB that are accepted.`, true);
    return;
  }
  say("Looking ...");
  document.body.classList.add("busy");
  const started = performance.now();
  try {
    const answer = await fetch("/v1/predict?confidence=" + LOWEST, {
      method: "POST", body: file, headers: { "Content-Type": file.type.startsWith("image/") ? file.type : "application/octet-stream" },
    });
    const content = await answer.json();
    if (mine !== turn) return;
    if (!answer.ok) throw new Error(content.error);
    const seconds = (performance.now() - started) / 1000;
    result = content.images[0];
    await show(file, seconds);
  } catch (error) {
    if (mine !== turn) return;
    clear();
    const isLost = error instanceof TypeError;
    say(isLost ? "The server does not answer; try again." : sentence(`${file.name ? file.name + ": " : ""}${error.message.replace(/^image: /, "")}`), true);
  } finally {
    if (mine === turn) document.body.classList.remove("busy");
  }
}
const sentence = (text) => text + (/[.!?]$/.test(text) ? "" : ".");

function clear() {
  result = null;
  for (const id of ["figure", "controls", "table"]) $(id).hidden = true;
  document.body.classList.remove("has-image");
}

async function show(file, seconds) {
  const image = $("image");
  if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  await image.decode().catch(() => {});
  const isSmall = Math.max(result.width, result.height) < 320;
  image.style.width = isSmall ? "min(100%, " + Math.min(result.width * 6, 480) + "px)" : "";
  $("frame").classList.toggle("pixels", isSmall);
  pixels = result.mask ? await maskPixels(result.mask) : null;
  $("caption").textContent = `${file.name || "Pasted image"}, ${result.width} × ${result.height} px, answered in ${seconds.toFixed(2)} s`;
  document.body.classList.add("has-image");
  for (const id of ["figure", "controls"]) $(id).hidden = false;
  update();
}

async function maskPixels(base64) {
  const image = new Image();
  image.src = "data:image/png;base64," + base64;
  await image.decode();
  const canvas = $("mask");
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

function update() {
  const lowest = Number($("confidence").value) / 100;
  $("shown").textContent = percent(lowest);
  if (!result) return;
  let rows = result.predictions.filter((row) => row.score >= lowest);
  const isClassified = model.task === "classification";
  if (isClassified) rows = rows.slice(0, 10);
  drawBoxes(rows);
  drawMask(rows);
  table(rows);
  $("image").alt = description(rows);
  say(description(rows));
}

function description(rows) {
  const lowest = $("shown").textContent;
  if (!rows.length) return `Nothing with a score of ${lowest} or more.`;
  if (model.task === "classification") return `${rows[0].class}, ${percent(rows[0].score)}.`;
  if (model.task === "segmentation") {
    return rows.map((row) => `${row.class} ${percent(row.share)}`).slice(0, 4).join(", ") + " of the image.";
  }
  const counts = new Map();
  for (const row of rows) counts.set(row.class, (counts.get(row.class) || 0) + 1);
  const parts = [...counts].sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name}${count > 1 ? ` (${count})` : ""}`);
  const more = parts.length > 4 ? `, and ${parts.length - 4} more classes` : "";
  return `${plural(rows.length, "object")}: ${parts.slice(0, 4).join(", ")}${more}.`;
}

function drawBoxes(rows) {
  const svg = $("boxes"), frame = $("frame");
  svg.replaceChildren();
  frame.querySelector(".tags")?.remove();
  const boxed = rows.map((row, index) => [row, index]).filter(([row]) => row.bbox);
  if (!boxed.length) return;
  svg.setAttribute("viewBox", `0 0 ${result.width} ${result.height}`);
  const tags = element("div", frame);
  tags.className = "tags";
  tags.setAttribute("aria-hidden", "true");
  for (const [row, index] of boxed.reverse()) { // the highest score on top
    const [x, y, width, height] = row.bbox;
    const group = document.createElementNS(SVG, "g");
    group.dataset.row = index;
    for (const name of ["box-edge", "box"]) {
      const box = document.createElementNS(SVG, "rect");
      for (const [key, value] of Object.entries({ x, y, width, height, class: name })) box.setAttribute(key, value);
      if (name === "box") box.style.stroke = colour(row.label);
      group.append(box);
    }
    svg.append(group);
    const tag = element("span", tags, `${row.class} ${percent(row.score)}`);
    tag.className = "tag";
    tag.dataset.row = index;
    tag.style.background = colour(row.label);
    const isLow = y / result.height > 0.06;
    tag.style.left = `clamp(0%, ${(x / result.width) * 100}%, calc(100% - 3rem))`;
    tag.style.top = `${(y / result.height) * 100}%`;
    tag.style.transform = isLow ? "translateY(-100%)" : "none";
  }
}

function drawMask(rows, only) {
  const canvas = $("mask");
  canvas.hidden = !pixels;
  if (!pixels) return;
  const shown = new Set();
  for (const row of rows) {
    if (row.label === 0 && only !== 0) continue; // class 0 is the background
    if (only !== undefined && row.label !== only) continue;
    const [r, g, b] = palette(row.label);
    shown.add((r << 16) | (g << 8) | b);
  }
  const context = canvas.getContext("2d");
  const image = context.createImageData(pixels.width, pixels.height);
  const from = pixels.data, to = image.data;
  for (let i = 0; i < from.length; i += 4) {
    if (!shown.has((from[i] << 16) | (from[i + 1] << 8) | from[i + 2])) continue;
    to[i] = from[i]; to[i + 1] = from[i + 1]; to[i + 2] = from[i + 2]; to[i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function table(rows) {
  const hasShare = rows.some((row) => row.share !== undefined);
  const columns = $("columns");
  columns.replaceChildren();
  for (const [name, isNumber] of [["Class", false], ["Score", true], ...(hasShare ? [["Area", true]] : [])]) {
    const head = element("th", columns, name);
    head.scope = "col";
    if (isNumber) head.className = "number";
  }
  $("rows").replaceChildren();
  $("table").hidden = !rows.length;
  rows.forEach((row, index) => {
    const line = element("tr", $("rows"));
    line.tabIndex = 0;
    const cell = element("td", line);
    const swatch = element("span", cell);
    swatch.className = "swatch";
    swatch.style.background = colour(row.label);
    swatch.setAttribute("aria-hidden", "true");
    cell.append(row.class);
    element("td", line, percent(row.score)).className = "number";
    if (hasShare) element("td", line, percent(row.share)).className = "number";
    const single = () => highlight(rows, index), all = () => highlight(rows, null);
    line.addEventListener("mouseenter", single);
    line.addEventListener("mouseleave", all);
    line.addEventListener("focus", single);
    line.addEventListener("blur", all);
  });
}

function highlight(rows, index) {
  for (const node of document.querySelectorAll("#boxes g, .tag")) {
    node.classList.toggle("dim", index !== null && Number(node.dataset.row) !== index);
  }
  drawMask(rows, index === null ? undefined : rows[index].label);
}

const take = (files) => { const file = [...files][0]; if (file) look(file); };
$("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
$("confidence").addEventListener("input", update);
document.addEventListener("paste", (event) => take(event.clipboardData.files));
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => { event.preventDefault(); $("drop").classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
about();
