
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { exact, unknown, plots } = data; // Values are tenths of a dB; null: not measured.
  const byId = (id) => document.getElementById(id);
  // Viridis: even steps to the eye, and in order without colour vision too.
  const RAMP = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30",
    "#fde725"].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const known = (value) => value !== null && value !== exact && value !== unknown;
  const db = (value) => value === exact ? "exact" : value === unknown ? "unknown"
    : value === null ? "not measured" : (value / 10).toFixed(1) + " dB";
  const many = (number) => number.toLocaleString("en");
  const name = (plot) => plot.role + " (" + plot.format + ")";

  function colour(share) {
    const at = Math.min(0.9999, Math.max(0, share)) * (RAMP.length - 1);
    const [low, high] = [RAMP[Math.floor(at)], RAMP[Math.floor(at) + 1]];
    const mix = low.map((c, i) => Math.round(c + (high[i] - c) * (at % 1)));
    return "rgb(" + mix.join(",") + ")";
  }

  /* A step of 1, 2 or 5 times a power of ten that cuts the span in about so many. */
  function step(span, parts) {
    const raw = span / parts;
    const ten = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((k) => k * ten).find((one) => one >= raw);
  }

  function svg(tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function options(select, names) {
    names.forEach((text, at) => select.add(new Option(text, at)));
  }

  // --- Heat map of experts ------------------------------------------------------------------------

  /* Grids over the same layers and experts as one whose every place has its worst. */
  function together(grids) {
    const layers = [...new Set(grids.flatMap((g) => g.layers))].sort((a, b) => a - b);
    const experts = [...new Set(grids.flatMap((g) => g.experts))].sort((a, b) => a - b);
    const row = new Map(layers.map((layer, at) => [layer, at]));
    const column = new Map(experts.map((expert, at) => [expert, at]));
    const values = new Array(layers.length * experts.length).fill(null);
    for (const grid of grids) {
      grid.values.forEach((value, i) => {
        if (value === null) return;
        const y = row.get(grid.layers[Math.floor(i / grid.experts.length)]);
        const at = y * experts.length + column.get(grid.experts[i % grid.experts.length]);
        if (values[at] === null || value < values[at]) values[at] = value;
      });
    }
    return { layers, experts, values };
  }

  /* Where the colours begin and end: the middle 99 % of values, and 3 dB at least, so that neither
     one outlier nor rounding takes all of them. */
  function range(values) {
    const sorted = values.filter(known).sort((a, b) => a - b);
    if (!sorted.length) return null;
    let low = sorted[Math.floor(0.005 * (sorted.length - 1))];
    let high = sorted[Math.ceil(0.995 * (sorted.length - 1))];
    if (high - low < 30) [low, high] = [(low + high) / 2 - 15, (low + high) / 2 + 15];
    return { low, high, under: sorted[0] < low, over: sorted[sorted.length - 1] > high };
  }

  function heat() {
    const canvas = byId("heat"), select = byId("heat-role"), tip = byId("heat-tip");
    if (!canvas) return;
    const grids = plots.filter((plot) => plot.kind === "grid");
    const shown = grids.length > 1 ? [together(grids), ...grids] : grids;
    options(select, [...(grids.length > 1 ? ["all: the worst of each expert"] : []), ...grids.map(name)]);
    const left = 58, top = 8, bottom = 40;
    let place = null;

    function draw() {
      const { layers, experts, values } = shown[Number(select.value)];
      const style = getComputedStyle(document.documentElement);
      const ink = (key) => style.getPropertyValue("--" + key).trim();
      const room = Math.max(320, canvas.parentElement.clientWidth - 22);
      const wide = Math.min((room - left - 6) / experts.length, 46);
      const high = Math.max(7, Math.min(22, 520 / layers.length));
      const [width, height] = [wide * experts.length, high * layers.length];
      const density = window.devicePixelRatio || 1;
      canvas.width = Math.round((left + width + 6) * density);
      canvas.height = Math.round((top + height + bottom) * density);
      canvas.style.width = left + width + 6 + "px";
      canvas.style.height = top + height + bottom + "px";
      const pen = canvas.getContext("2d");
      pen.scale(density, density);
      const snap = (value) => Math.round(value * density) / density;
      const bounds = range(values);
      const gap = wide > 6 && high > 6 ? 1 : 0;
      let drawn = 0, worst = -1;
      const counts = { exact: 0, unknown: 0, absent: 0 };

      pen.save();
      pen.beginPath();
      pen.rect(left, top, width, height);
      pen.clip();
      pen.strokeStyle = ink("hatch");
      pen.lineWidth = 1;
      for (let x = left - height; x < left + width; x += 6) {
        pen.beginPath();
        pen.moveTo(x, top + height);
        pen.lineTo(x + height, top);
        pen.stroke();
      }
      values.forEach((value, i) => {
        if (value === null) { counts.absent += 1; return; }
        const [row, column] = [Math.floor(i / experts.length), i % experts.length];
        const [x, y] = [snap(left + column * wide), snap(top + row * high)];
        const [w, h] = [snap(left + (column + 1) * wide) - x - gap, snap(top + (row + 1) * high) - y - gap];
        if (value === exact) counts.exact += 1;
        else if (value === unknown) counts.unknown += 1;
        else if (worst < 0 || value < values[worst]) worst = i;
        pen.fillStyle = value === exact ? ink("exact") : value === unknown ? ink("unknown")
          : colour((value - bounds.low) / (bounds.high - bounds.low));
        pen.fillRect(x, y, w, h);
        drawn += 1;
      });
      pen.restore();
      pen.strokeStyle = ink("line");
      pen.strokeRect(left, top, width, height);
      axes(pen, ink, layers, experts, wide, high);
      if (worst >= 0) {
        const [row, column] = [Math.floor(worst / experts.length), worst % experts.length];
        const [x, y] = [left + (column + 0.5) * wide, top + (row + 0.5) * high];
        for (const [line, paint] of [[4, "#000"], [2, "#fff"]]) {
          pen.lineWidth = line;
          pen.strokeStyle = paint;
          pen.beginPath();
          pen.arc(x, y, Math.max(7, high * 0.7), 0, 2 * Math.PI);
          pen.stroke();
        }
      }
      legend(bounds, counts);
      byId("heat-note").textContent = worst < 0 ? ""
        : "In the ring the worst: layer " + layers[Math.floor(worst / experts.length)] + ", expert "
          + experts[worst % experts.length] + ", " + db(values[worst]) + ".";
      place = { layers, experts, values, wide, high };
      canvas.dataset.drawn = drawn;
    }

    function axes(pen, ink, layers, experts, wide, high) {
      pen.fillStyle = ink("quiet");
      pen.font = "12px system-ui, sans-serif";
      const [width, height] = [wide * experts.length, high * layers.length];
      const ticks = (labels, size, least, put) => {
        const every = Math.max(1, Math.round(step(labels.length, (size * labels.length) / least)));
        labels.forEach((label, at) => {
          const regular = labels[labels.length - 1] - labels[0] === labels.length - 1;
          if ((regular ? label : at) % every === 0) put(label, at);
        });
      };
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      ticks(layers, high, 22, (label, at) => pen.fillText(label, left - 6, top + (at + 0.5) * high));
      pen.textAlign = "center";
      pen.textBaseline = "top";
      ticks(experts, wide, 42, (label, at) => pen.fillText(label, left + (at + 0.5) * wide, top + height + 5));
      pen.fillStyle = ink("ink");
      pen.fillText("expert", left + width / 2, top + height + 22);
      pen.save();
      pen.translate(12, top + height / 2);
      pen.rotate(-Math.PI / 2);
      pen.textBaseline = "middle";
      pen.fillText("layer", 0, 0);
      pen.restore();
    }

    function legend(bounds, counts) {
      const box = byId("heat-legend");
      box.replaceChildren();
      const span = (...parts) => {
        const made = document.createElement("span");
        made.append(...parts);
        box.append(made);
      };
      const block = (kind) => {
        const made = document.createElement("i");
        made.className = kind;
        return made;
      };
      if (bounds) {
        const ramp = block("ramp");
        const stops = RAMP.map((c) => "rgb(" + c.join(",") + ")");
        ramp.style.background = "linear-gradient(to right, " + stops.join(", ") + ")";
        const low = (bounds.under ? "≤ " : "") + (bounds.low / 10).toFixed(1) + " dB";
        const high = (bounds.over ? "≥ " : "") + (bounds.high / 10).toFixed(1) + " dB";
        span("worse: " + low, ramp, high + ": better");
      }
      for (const [kind, text] of [["exact", "exact"], ["unknown", "unknown"], ["absent", "not measured"]]) {
        if (counts[kind]) span(block("swatch " + kind), text + ": " + many(counts[kind]));
      }
    }

    canvas.addEventListener("mousemove", (event) => {
      const { layers, experts, values, wide, high } = place;
      const [x, y] = [event.offsetX, event.offsetY];
      const [row, column] = [Math.floor((y - top) / high), Math.floor((x - left) / wide)];
      tip.hidden = row < 0 || column < 0 || row >= layers.length || column >= experts.length;
      if (tip.hidden) return;
      tip.textContent = "layer " + layers[row] + ", expert " + experts[column] + ": "
        + db(values[row * experts.length + column]);
      const over = x > canvas.clientWidth - 230;
      tip.style.left = (over ? x - 10 - tip.offsetWidth : x + 22) + "px";
      tip.style.top = y + 16 + "px";
    });
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    select.addEventListener("change", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("resize", draw);
    draw();
  }

  // --- Histogram ----------------------------------------------------------------------------------

  function histogram() {
    const box = byId("histogram"), select = byId("histogram-role");
    if (!box) return;
    options(select, ["all matrices", ...plots.map(name)]);

    function draw() {
      const chosen = Number(select.value);
      const values = (chosen ? [plots[chosen - 1]] : plots).flatMap((plot) => plot.values);
      const finite = values.filter(known).sort((a, b) => a - b);
      const [equal, unsaid] = [exact, unknown].map((kind) => values.filter((v) => v === kind).length);
      box.replaceChildren();
      const aside = [[equal, "exact"], [unsaid, "unknown"]].filter(([n]) => n).map(([n, t]) => many(n) + " " + t);
      const beside = aside.length ? "In addition: " + aside.join(", ") + "." : "";
      byId("histogram-note").textContent = (finite.length ? "" : "None has an SQNR in dB. ") + beside;
      if (!finite.length) { box.dataset.drawn = 0; return; }
      // On a telephone text keeps its size, and labels are fewer.
      const width = Math.max(330, Math.min(1170, box.clientWidth - 22 || 1170));
      const height = 250, left = 58, bottom = 42, top = 22, right = 12;
      const [low, high] = [finite[0] / 10, finite[finite.length - 1] / 10];
      const size = Math.max(0.1, step(Math.max(high - low, 2), 60));
      const first = Math.floor(low / size + 1e-9), last = Math.floor(high / size + 1e-9);
      const bins = new Array(last - first + 1).fill(0);
      for (const value of finite) bins[Math.floor(value / 10 / size + 1e-9) - first] += 1;
      const most = Math.max(...bins);
      const x = (level) => left + ((level / size - first) / bins.length) * (width - left - right);
      // Counts go up as logarithms: one bad matrix among thousands must be seen.
      const y = (n) => height - bottom - (Math.log1p(n) / Math.log1p(most)) * (height - bottom - top);
      const picture = svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img",
        "aria-label": "Histogram of SQNR" });
      for (let n = 1; n <= most; n *= 10) {
        picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(n), y2: y(n) }));
        picture.append(svg("text", { x: left - 6, y: y(n) + 4, "text-anchor": "end" }, many(n)));
      }
      let drawn = 0;
      bins.forEach((n, at) => {
        if (!n) return;
        const [from, to] = [x((first + at) * size), x((first + at + 1) * size)];
        const bar = svg("rect", { class: "mark", x: from + 0.5, width: Math.max(1, Math.min(to - from - 1, 40)),
          y: y(n), height: height - bottom - y(n) });
        const span = ((first + at) * size).toFixed(1) + " to " + ((first + at + 1) * size).toFixed(1) + " dB: ";
        bar.append(svg("title", {}, span + many(n)));
        picture.append(bar);
        drawn += 1;
      });
      const label = step(Math.max((last - first + 1) * size, 1), Math.round(width / 100));
      for (let level = Math.ceil((first * size) / label) * label; level <= (last + 1) * size + 1e-9; level += label) {
        picture.append(svg("line", { class: "grid", x1: x(level), x2: x(level), y1: height - bottom,
          y2: height - bottom + 4 }));
        picture.append(svg("text", { x: x(level), y: height - bottom + 17, "text-anchor": "middle" },
          String(Math.round(level * 10) / 10)));
      }
      picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: height - bottom,
        y2: height - bottom }));
      const middle = finite[(finite.length - 1) >> 1] / 10;
      const side = x(middle) > width - 160 ? "end" : "start";
      picture.append(svg("line", { class: "median", x1: x(middle), x2: x(middle), y1: 6, y2: height - bottom }));
      picture.append(svg("text", { x: x(middle) + (side === "end" ? -6 : 6), y: 14, "text-anchor": side },
        "median " + middle.toFixed(1) + " dB"));
      picture.append(svg("text", { class: "name", x: (left + width) / 2, y: height - 6,
        "text-anchor": "middle" }, "SQNR, dB"));
      picture.append(svg("text", { class: "name", "text-anchor": "middle",
        transform: "translate(13 " + (height - bottom + top) / 2 + ") rotate(-90)" }, "matrices (log scale)"));
      box.append(picture);
      box.dataset.drawn = drawn;
    }

    select.addEventListener("change", draw);
    draw();
  }

  // --- Roles outside the experts, a panel each ----------------------------------------------------

  function panels() {
    const box = byId("series");
    if (!box) return;
    // Where all is exact a line says so, above.
    const series = plots.filter((plot) => plot.kind === "series"
      && plot.values.some((value) => value !== exact && value !== null));
    const finite = series.flatMap((plot) => plot.values).filter(known).map((value) => value / 10);
    const layers = series.flatMap((plot) => plot.layers);
    const [from, to] = [Math.min(...layers), Math.max(...layers)];
    const pad = finite.length ? Math.max(1, (Math.max(...finite) - Math.min(...finite)) * 0.08) : 1;
    const low = finite.length ? Math.min(...finite) - pad : 0;
    const high = finite.length ? Math.max(...finite) + pad : 1;
    const width = 360, height = 150, left = 34, right = 10, top = 30, bottom = 32;
    const x = (layer) => left + 6 + ((layer - from) / Math.max(1, to - from)) * (width - left - right - 12);
    const y = (level) => height - bottom - ((level - low) / (high - low)) * (height - top - bottom);
    let drawn = 0;
    for (const plot of series) {
      const picture = svg("svg", { viewBox: "0 0 " + width + " " + height, role: "img",
        "aria-label": "SQNR by layer of " + name(plot) });
      picture.append(svg("text", { class: "name", x: 0, y: 13 }, name(plot)));
      const all = plot.values.filter(known);
      const said = all.length ? "worst " + db(Math.min(...all)) : db(plot.values[0]);
      picture.append(svg("text", { x: width - right, y: 13, "text-anchor": "end" }, said));
      const levels = finite.length ? step(high - low, 3) : 2;
      for (let level = Math.ceil(low / levels) * levels; level <= high; level += levels) {
        picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(level), y2: y(level) }));
        picture.append(svg("text", { x: left - 5, y: y(level) + 4, "text-anchor": "end" },
          String(Math.round(level * 10) / 10)));
      }
      const apart = Math.max(1, Math.round(step(Math.max(1, to - from), 6)));
      for (let layer = Math.ceil(from / apart) * apart; layer <= to; layer += apart) {
        picture.append(svg("text", { x: x(layer), y: height - bottom + 15, "text-anchor": "middle" }, layer));
      }
      picture.append(svg("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, "layer"));
      const points = plot.layers.map((layer, at) => [layer, plot.values[at]]).filter(([, v]) => v !== null);
      const path = points.filter(([, v]) => known(v)).map(([layer, v]) => x(layer) + "," + y(v / 10)).join(" ");
      picture.append(svg("polyline", { class: "thread", points: path }));
      for (const [layer, value] of points) {
        const at = x(layer), floor = height - bottom;
        const mark = value === exact ? svg("circle", { class: "ring", cx: at, cy: top - 6, r: 2.6 })
          : value === unknown
            ? svg("path", { class: "cross", d: `M${at - 3} ${floor - 7}l6 6m0 -6l-6 6` })
            : svg("circle", { class: "mark", cx: at, cy: y(value / 10), r: 2.4 });
        mark.append(svg("title", {}, "layer " + layer + ": " + db(value)));
        picture.append(mark);
        drawn += 1;
      }
      const card = document.createElement("div");
      card.className = "plot";
      card.append(picture);
      box.append(card);
    }
    box.dataset.drawn = drawn;
  }

  // --- Table of the worst -------------------------------------------------------------------------

  function sorting() {
    const table = byId("worst");
    if (!table) return;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      const figures = head.classList.contains("figure");
      const key = (row) => {
        const cell = row.cells[column];
        if (!figures) return cell.textContent;
        const text = cell.dataset.v; // As Python writes floats: "inf", "-inf".
        return text === undefined ? NaN : Number(text.replace("inf", "Infinity"));
      };
      const compare = (a, b) => {
        if (!figures) return (up ? 1 : -1) * a.localeCompare(b, "en", { numeric: true });
        // What has no figure stands last, whichever way the others go.
        if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);
        return a === b ? 0 : up === a < b ? -1 : 1;
      };
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [key(row), row]).sort((a, b) => compare(a[0], b[0]));
      body.append(...rows.map(([, row]) => row));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      table.dataset.sorted = head.dataset.key + ":" + (up ? "ascending" : "descending");
    }));
  }

  heat();
  histogram();
  panels();
  sorting();
})();
