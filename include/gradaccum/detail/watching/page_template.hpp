// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace gradaccum::detail {

/// The page of a run up to its JSON. Its content security policy allows only this style and this script, by their
/// SHA-256; tests/watching/browser.py checks the hashes.
inline constexpr std::string_view page_before_json = R"html(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none';
style-src 'sha256-OJQE8E39eJimyMldqlCVMTidZsquwBCqQpU4DELoJ1o=';
script-src 'sha256-kf66+J7NJcrdGBNi4oG9By3wYHJL8fz8bo6TJFId4ZU='">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Training</title>
<style>
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1c1f22;--soft:#5f656b;--line:#e2e2dc;--grid:#ecece8;
--c0:#0b6aad;--c1:#d05a00;--c2:#00866a;--c3:#ad5a97;--c4:#a17700;--c5:#3f9bd6;--c6:#7263bd;--c7:#71767b;
--running:#0b6aad;--finished:#0a7357;--stopped:#8c5a00;--interrupted:#b0342a}
@media screen and (prefers-color-scheme:dark){
:root{--page:#111315;--card:#191c1f;--ink:#e8e8e4;--soft:#9aa1a8;--line:#2e3338;--grid:#262b2f;
--c0:#5aaef0;--c1:#f29457;--c2:#41c6a3;--c3:#e29fcd;--c4:#e3bd55;--c5:#9bd4fa;--c6:#b2a8f2;--c7:#a6abb0;
--running:#5aaef0;--finished:#41c6a3;--stopped:#e3bd55;--interrupted:#f28b80}}
*{box-sizing:border-box;margin:0}
body{max-width:72rem;margin:auto;padding:clamp(1rem,4vw,2.5rem);background:var(--page);color:var(--ink);
font:1rem/1.5 system-ui,"Noto Sans","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font-size:clamp(1.5rem,4vw,2.1rem);line-height:1.2}
h2{font-size:1.1rem;margin:2rem 0 .6rem}
h3{font-size:1rem}
header,figcaption,ul{display:flex;flex-wrap:wrap;align-items:center;gap:.2rem 1rem}
#state{border:1px solid;border-radius:1rem;padding:.1rem .8rem;font-size:.9rem;font-weight:600}
progress{width:100%;height:.5rem;margin-top:1rem;accent-color:var(--c0)}
.note,small,#progress{color:var(--soft);font-size:.8rem}
#tiles,#charts,#tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
#tiles{grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.8rem;margin:1.4rem 0}
#tables{gap:0 2.4rem;align-items:start}
article{margin-top:1rem}
.frames{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:.4rem;margin-top:.6rem}
#tiles div,figure,article{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.7rem 1rem}
figure,section,#tiles div{min-width:0}
#tiles b{display:block;font-size:1.4rem;line-height:1.35}
figure:first-child,figure:last-child:nth-child(even),section:first-child{grid-column:1/-1}
ul{list-style:none;padding:0;margin-left:auto;font-size:.85rem;color:var(--soft)}
i{display:inline-block;width:1.1rem;border-top:.2rem solid;margin-right:.4rem;vertical-align:.25rem}
i.dashed{border-top-style:dashed}
button{font:inherit;font-size:.75rem;color:var(--soft);background:none;border:1px solid var(--line);border-radius:.3rem;
padding:0 .4rem;cursor:pointer}
button[aria-pressed=true]{color:var(--card);background:var(--soft)}
.plot{position:relative;height:11.2rem;margin:1rem .9rem 2.4rem 3.4rem}
figure:first-child .plot{height:15.2rem}
.plot svg{position:absolute;width:100%;height:100%;overflow:visible;clip-path:inset(-4px)}
svg *{vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
.grid{stroke:var(--grid)}
.hover{stroke:var(--soft)}
.line,.dots,.frames path{fill:none;stroke:currentColor;stroke-width:1.8}
.line.dashed{stroke-dasharray:5 4}
.band,.area{fill:currentColor;opacity:.17}
.area{opacity:.85}
.plot span{position:absolute;font-size:.75rem;line-height:1;white-space:nowrap;color:var(--soft)}
.plot .y{transform:translate(-100%,-50%);margin-left:-.5rem}
.plot .x{transform:translateX(-50%);margin-top:.5rem}
.plot .unit{transform:translateX(-100%);margin-top:1.5rem}
.plot .mark{transform:translate(-50%,-50%);color:var(--interrupted);font-size:.65rem}
output:empty,.plot:not(:hover) .hover,.plot:not(:hover) output,[hidden]{display:none}
output{position:absolute;z-index:1;pointer-events:none;background:var(--card);margin:.4rem 1.5rem;
border:1px solid var(--line);border-radius:.4rem;padding:.3rem .6rem;font-size:.8rem;box-shadow:0 .1rem .6rem #0003}
table{width:100%;border-collapse:collapse;font-size:.9rem}
th,td{padding:.4rem .8rem .4rem 0;text-align:left;vertical-align:top;border-top:1px solid var(--line);font-weight:400}
td{text-align:right;white-space:pre-wrap;padding-right:0;padding-left:.8rem}
th{min-width:7rem}
th:only-child{font-weight:600;padding-top:1rem}
@media print{body{padding:0;font-size:9pt}figure,article,tr{break-inside:avoid}button{display:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
</style>
</head>
<body>
<noscript>This page draws its curves by a script of its own: allow it to run scripts.</noscript>
<header><h1></h1><p id="state"></p></header>
<progress hidden aria-label="done"></progress>
<p id="progress"></p>
<div id="tiles"></div>
<main id="charts"></main>
<div id="drawings"></div>
<div id="tables"></div>
<template><figure><figcaption><h3></h3><button title="A logarithmic scale">log</button><ul></ul></figcaption>
<div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img"></svg></div><p class="note"></p>
</figure></template>
<script id="run" type="application/json">)html";

/// The rest of the page, after its JSON. The script sets text by `textContent` only, so that names cannot become
/// markup.
inline constexpr std::string_view page_after_json = R"html(</script>
<script>
'use strict';
const find = (selector, from = document) => from.querySelector(selector), run = JSON.parse(find('#run').textContent);
const template = find('template').content.firstElementChild;

// Control characters and marks that change the direction of text are shown as a visible replacement.
const unseen = /(?![\n\t])[\p{Cc}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/gu;
const clean = (text, most = 1e4) => (text.length > most ? text.slice(0, most) + '…' : text).replace(unseen, '\ufffd');
const make = (to, tag, text = '', attributes = {}) => {
  const one = document.createElementNS(to.namespaceURI, tag);  // of HTML or of SVG
  for (const name in attributes) one.setAttribute(name, attributes[name]);
  one.textContent = clean(text);
  return to.appendChild(one);
};
// All ticks of an axis have one form, which depends on the largest of them.
const number = (value, largest) => {
  if (typeof value !== 'number') return clean(value ?? '–');
  const size = largest ?? Math.abs(value), digits = {maximumSignificantDigits: largest ? 6 : 4};
  if (value && (size < (largest ? 1e-2 : 1e-3) || size >= 1e15))
    return Number(value.toPrecision(largest ? 6 : 4)).toExponential().replace('+', '');
  if (largest >= 1e4) digits.notation = 'compact';
  return value.toLocaleString('en', largest || size < 1000 ? digits : {maximumFractionDigits: 0});
};
const duration = seconds => {
  const hours = Math.floor(seconds / 3600), two = value => String(Math.floor(value % 60)).padStart(2, '0');
  return (hours ? hours + ':' + two(seconds / 60) : Math.floor(seconds / 60)) + ':' + two(seconds);
};
const least = (all, of) => all.reduce((best, one) => best && of(best) <= of(one) ? best : one, undefined);
const joined = parts => parts.filter(Boolean).join(' · ');
const nearest = (points, x) => least(points, point => Math.abs(point.x - x));

// A curve's chart is named by the part of its name after the last `/`; all curves of memory/ share one, in MB or GB.
const runs = run.runs.filter(({name, curves}) => name || curves.length), single = runs.length === 1;
const isMemory = name => name.startsWith('memory/'), isLarge = piece => piece[4] >= 10 * 2 ** 30;
const inGB = runs.some(({curves}) => curves.some(([name, , pieces]) => isMemory(name) && pieces.some(isLarge)));
const [unit, unitName] = inGB ? [2 ** 30, 'GB'] : [2 ** 20, 'MB'];
const known = new Map([['loss', ['Loss', 0]], ['accuracy', ['Accuracy', 1]], ['lr', ['Learning rate', 3]],
  ['grad_norm', ['Gradient norm', 4]], ['samples_per_second', ['Samples per second', 5]],
  ['memory/', [`Memory (${unitName})`, 6]]]);
const knownOf = chart => known.get(chart) ?? [chart || 'curve', 2];
const curveOf = ([name, last, pieces]) => {
  const slash = name.lastIndexOf('/'), series = isMemory(name) ? name.slice(7) : name.slice(0, Math.max(slash, 0));
  const scaled = value => typeof value === 'number' && isMemory(name) ? value / unit : value;
  const points = pieces.map(([first, last, mean, low, high, lowAt, highAt, gaps]) => ({first, last,
    x: (first + last) / 2, mean: scaled(mean), low: scaled(low), high: scaled(high), lowAt, highAt, gaps}));
  const finite = points.filter(point => point.mean !== null);
  return {name, series, chart: isMemory(name) ? 'memory/' : name.slice(slash + 1), points, finite, last: scaled(last),
    low: least(finite, point => point.low), high: least(finite, point => -point.high)};
};
for (const one of runs) one.curves = one.curves.map(curveOf);
const curves = runs.flatMap(one => one.curves), others = curves.filter(one => !isMemory(one.name));
const prefixes = [...new Set(['train', ...others.map(one => one.series)])];

// Each layer of a stack is raised by those below it. Of several runs only the sums are drawn.
const stack = layers => {
  const base = least(layers, one => -one.finite.length).finite, sums = base.map(() => 0);
  const raised = layers.map(layer => ({...layer, points: base.map((point, i) => {
    const mean = sums[i] += nearest(layer.finite, point.x)?.mean ?? 0;
    return {...point, mean, low: mean, high: mean, gaps: 0};
  })}));
  return single ? raised : raised.slice(-1).map(sum => ({...sum, finite: sum.points}));
};
// The colour of a series shows its run; with a single run, its prefix.
const seriesOf = chart => runs.flatMap(({name, curves}, place) => {
  const here = curves.filter(one => one.chart === chart), drawn = here.length && isMemory(chart) ? stack(here) : here;
  const colour = ({series}, i) => !single ? place : isMemory(chart) ? i : prefixes.indexOf(series || 'train');
  return drawn.map((curve, i) => ({...curve, dashed: !single && i > 0, colour: `var(--c${colour(curve, i) % 8})`,
    label: !single && joined([name, drawn.length > 1 && curve.series]) || curve.series || chart}));
});
const charts = [...new Set(curves.map(curve => curve.chart))]
  .sort((a, b) => knownOf(a)[1] - knownOf(b)[1]).slice(0, 100).map(name => ({name, series: seriesOf(name)}));

// A few numbers that lie far outside of all others are cut off, since they would flatten the rest.
const rangeOf = share => {
  const [min, a, b, max] = [0, .02, .98, 1].map(part => Math.min(Math.max(share(part), -1e300), 1e300));
  const spread = Math.max((b - a) / 2, 5e-4 * Math.max(Math.abs(a), Math.abs(b)));
  let low = a - min > 6 * spread ? a - spread / 2 : min, high = max - b > 6 * spread ? b + spread / 2 : max;
  if (low > 0 && low < .3 * high) low = 0;
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < 1e-290) return [0, 1];
  return high - low > 2e-9 * size ? [low, high] : [Math.min(low, 0), Math.max(high, 0)];  // of one number: from 0
};
// Ticks at multiples of 1, 2 or 5 times a power of ten; an axis of whole numbers ends at the last of them.
const axisOf = ([low, high], steps, isWhole) => {
  const size = Math.max(high / steps - low / steps, isWhole ? 1 : 0), unit = 10 ** Math.floor(Math.log10(size));
  const step = unit * [1, 2, 5, 10].find(digit => digit * unit >= size * (1 - 1e-9));
  const from = isWhole ? low : Math.floor(low / step + 1e-6) * step;
  const to = isWhole ? high : Math.ceil(high / step - 1e-6) * step;
  const begin = Math.ceil(from / step - 1e-6), count = Math.min(Math.floor(to / step + 1e-6) - begin + 1, 50);
  const ticks = Array.from({length: count}, (_, i) => (begin + i) * step);
  return {ticks, place: value => (value - from) / (to - from)};
};
const logAxisOf = (low, high) => {
  const from = Math.floor(Math.log10(low)), to = Math.max(Math.ceil(Math.log10(high)), from + 1);
  const {ticks, place} = axisOf([from, to], 6, true);
  return {ticks: ticks.map(tick => Number('1e' + tick)), place: value => place(Math.log10(value))};
};
// An axis of updates begins where the page's first curve does, so that a late curve is seen as one.
const first = least(curves.flatMap(one => one.points), point => point.first)?.first;
const updatesOf = points => {
  const last = least(points, point => -point.last)?.last ?? first, from = first > 0 && first < .1 * last ? 0 : first;
  return axisOf([from, Math.max(last, from + 1)], 5, true);
};

// Charts whose scale was switched are stored in the page's address, so that they survive a reload.
const switched = new Set(location.hash.slice(1).split('&').filter(Boolean));
const keyOf = chart => 'log=' + encodeURIComponent(chart.name);  // no element's id, to which a browser would scroll
// Places in a chart are in thousandths of its width and height.
const frameOf = chart => {
  const finite = chart.series.flatMap(one => one.points.filter(point => point.mean !== null));
  const isStack = isMemory(chart.name) && single, [low, high] = single ? ['low', 'high'] : ['mean', 'mean'];
  const sorted = finite.flatMap(point => [point[low], point.mean, point[high]]).sort((a, b) => a - b);
  const quantile = part => sorted[Math.round(part * (sorted.length - 1))] ?? 0;
  const share = sorted.length < 30 ? part => quantile(Math.round(part)) : quantile;
  const canLog = !isStack && sorted[0] > 0, spans = chart.name === 'lr' && quantile(.9) >= 60 * quantile(.1);
  const isLog = canLog && spans !== switched.has(keyOf(chart));
  const range = isStack ? [0, Math.max(share(1), 0) || 1] : rangeOf(share);
  const x = updatesOf(chart.series.flatMap(one => one.points));
  const y = isLog ? logAxisOf(share(0), share(1)) : axisOf(range, 4);
  return {x, y, canLog, isLog, isStack, finite, across: update => 1e3 * x.place(update),
    down: value => 1e3 * Math.min(Math.max(1 - y.place(value), -1), 2),
    above: finite.filter(point => y.place(point[high]) > 1 + 1e-6),
    below: finite.filter(point => y.place(point[low]) < -1e-6)};
};
const put = (plot, text, kind, left, top) =>
  Object.assign(make(plot, 'span', text, {class: kind}).style, {left: left / 10 + '%', top: top / 10 + '%'});
const drawAxes = (plot, svg, {x, y, isLog, across, down}) => {
  const textOf = (tick, ticks) => number(tick, Math.max(...ticks.map(Math.abs)));
  for (const tick of y.ticks) {
    make(svg, 'line', '', {class: 'grid', x2: 1e3, y1: down(tick), y2: down(tick)});
    put(plot, textOf(tick, isLog ? [tick] : y.ticks), 'tick y', 0, down(tick));
  }
  for (const tick of x.ticks) put(plot, textOf(tick, x.ticks), 'tick x', across(tick), 1e3);
  put(plot, 'update', 'unit', 1e3, 1e3);
};
// Returns whether a curve lies on another: nine of ten points are less than a hundredth of the height from it.
const isOn = ({finite: one}, {finite: other}, down) => {
  const some = one.filter((_, i) => i % Math.ceil(one.length / 32) === 0);
  const near = some.filter(({x, mean}) => Math.abs(down(mean) - down(nearest(other, x)?.mean)) < 10);
  return near.length >= Math.max(.9 * some.length, 1) && (one.length > 1 || other.length === 1);
};
const drawSeries = (svg, {points, colour, dashed, under}, {across, down, isStack}) => {
  const parts = [[]], share = 1 / (1 + under.length);
  for (const point of points) point.mean === null ? parts.push([]) : parts.at(-1).push(point);
  const place = (point, key) => across(point.x).toFixed(1) + ' ' + down(point[key] ?? 0).toFixed(1);
  const path = (part, key) => part.map(point => place(point, key)).join('L');
  const area = (top, bottom) => part => `M${path(part, top)}L${path([...part].reverse(), bottom)}Z`;
  const add = (kind, of, style = {}) => Object.assign(make(svg, 'path', '',
    {class: kind, d: parts.filter(part => part.length).map(of).join('')}).style, {color: colour, ...style});
  if (isStack) add('area', area('mean', 'zero'));
  else if (single) add('band', area('high', 'low'));
  add(dashed ? 'line dashed' : 'line', part => `M${path(part, 'mean')}h0`,  // those below show in its gaps
    under.length ? {strokeLinecap: 'butt', strokeDasharray: `${18 * share} ${18 * (1 - share)}`} : {});
  if (points.length <= 40 && !isStack)
    add('dots', part => `M${path(part, 'mean').replaceAll('L', 'h0M')}h0`, {strokeWidth: 5 * share});
};
const drawMarks = (plot, note, series, {above, below, across}) => {
  const gaps = series.flatMap(one => one.points.filter(point => point.gaps));
  for (const point of above) put(plot, '▲', 'mark', across(point.highAt), 0);
  for (const point of below) put(plot, '▼', 'mark', across(point.lowAt), 1e3);
  for (const point of gaps) put(plot, '×', 'mark', across(point.x), 980);
  const top = least(above, point => -point.high), bottom = least(below, point => point.low);
  const upper = series.filter(one => one.under.length).slice(0, 12).map(one => clean(one.label, 60)).join(', ');
  note.textContent = [top && `▲ cut off: up to ${number(top.high)} at update ${number(top.highAt)}.`,
    bottom && `▼ cut off: down to ${number(bottom.low)} at update ${number(bottom.lowAt)}.`,
    gaps.length && `× NaN or infinite: ${number(gaps.reduce((sum, point) => sum + point.gaps, 0))}.`,
    upper && `Dashed, since on other curves: ${upper}.`].filter(Boolean).join(' ');
};
const addKey = (to, {colour, dashed, label}, text = '') => {
  make(to, 'i', '', {class: dashed ? 'dashed' : ''}).style.borderColor = colour;
  to.append(clean(label, 60) + text);
};
const showNumbers = (plot, svg, series, {finite, across}) => {
  const output = make(plot, 'output'), line = make(svg, 'line', '', {class: 'hover', y2: 1e3});
  const reading = ({x, mean, low, high}, pointed) => ' ' + number(mean)
    + (low < high ? ` (${number(low)} – ${number(high)})` : '')
    + (Math.abs(across(x) - across(pointed)) > 20 ? ` at ${number(Math.round(x))}` : '');
  plot.onpointermove = event => {
    const box = plot.getBoundingClientRect(), pointer = 1e3 * (event.clientX - box.left) / box.width;
    const {x} = least(finite, point => Math.abs(across(point.x) - pointer)) ?? {}, place = across(x) / 10;
    if (x === undefined) return;
    output.replaceChildren(`update ${number(Math.round(x))}`);
    for (const one of series.slice(0, 12).filter(one => one.finite.length))
      addKey(make(output, 'div'), one, reading(nearest(one.finite, x), x));
    line.setAttribute('transform', `translate(${across(x)})`);
    Object.assign(output.style, place < 50 ? {left: place + '%', right: ''} : {left: '', right: 100 - place + '%'});
  };
};
const draw = chart => {
  const {figure, series} = chart, frame = frameOf(chart);
  const [button, plot, svg, note] = ['button', '.plot', 'svg', '.note'].map(one => find(one, figure));
  plot.replaceChildren(svg);
  svg.replaceChildren();
  drawAxes(plot, svg, frame);
  series.forEach((one, i) => one.under = series.slice(0, frame.isStack ? 0 : i)
    .filter(other => isOn(one, other, frame.down) || isOn(other, one, frame.down)));
  for (const one of frame.isStack ? [...series].reverse() : series) drawSeries(svg, one, frame);
  drawMarks(plot, note, series, frame);
  showNumbers(plot, svg, series, frame);
  button.hidden = !frame.canLog;
  button.setAttribute('aria-pressed', frame.isLog);
  button.onclick = () => {
    switched.delete(keyOf(chart)) || switched.add(keyOf(chart));
    history.replaceState(null, '', '#' + [...switched].join('&'));
    draw(chart);
  };
};
for (const chart of charts) {
  const {series} = chart, figure = chart.figure = find('#charts').appendChild(template.cloneNode(true));
  const heading = find('h3', figure).textContent = clean(knownOf(chart.name)[0], 60);
  find('svg', figure).setAttribute('aria-label', heading + ', by update; its numbers are in the table below');
  if (series.length > 1 || !['train', chart.name].includes(series[0].label))
    for (const one of series) addKey(make(find('ul', figure), 'li'), one);
  draw(chart);
}

for (const [name, frames] of run.drawings) {
  const article = make(find('#drawings'), 'article');
  make(article, 'h3', clean(name, 60));
  const row = make(article, 'div', '', {class: 'frames'});
  for (const [width, height, caption, lines] of frames) {
    const frame = make(row, 'div'), svg = frame.appendChild(find('svg', template).cloneNode());
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    svg.setAttribute('aria-label', clean(joined([name, caption]), 200));
    for (const [size, colour, points] of lines)
      Object.assign(make(svg, 'path', '', {d: `M${points.map(([x, y]) => x + ' ' + (height - y)).join('L')}h0`}).style,
        {stroke: `var(--c${colour})`, strokeWidth: size});
    make(frame, 'small', clean(caption, 60));
  }
}

const addTile = (name, value, note) => {
  const tile = make(find('#tiles'), 'div');
  for (const [tag, text] of [['small', name], ['b', number(value)], ['small', note]]) make(tile, tag, clean(text, 200));
};
const addTable = (heading, rows) => {
  if (!rows.length) return;
  const section = make(find('#tables'), 'section');
  make(section, 'h2', heading);
  const table = make(section, 'table');
  for (const [name, ...cells] of rows.slice(0, 600)) {
    const row = make(table, 'tr');
    make(row, 'th', clean(name, 200), {scope: 'row', colspan: cells.length ? 1 : 4});
    for (const text of cells) make(row, 'td', text);
  }
};
const isRunning = run.state === 'running', share = run.fraction === null ? '' : Math.floor(100 * run.fraction) + ' %';
const state = run.state === 'stopped' ? 'stopped early' : run.state;
const written = new Date(1000 * run.written).toISOString().slice(0, 19);
document.title = clean(joined([isRunning && share, run.title]));
find('h1').textContent = clean(run.title, 120);
find('#state').textContent = clean(state + (run.reason && ': ' + run.reason), 300);
find('#state').style.color = `var(--${run.state})`;
find('progress').hidden = !share;
find('progress').value = run.fraction ?? 0;
find('#progress').textContent = joined([share, (isRunning ? 'for ' : '') + duration(run.seconds),
  isRunning && run.left !== null && duration(run.left) + ' left', `written ${written.replace('T', ' ')} UTC`]);
for (const tile of run.tiles) addTile(...tile);
for (const [metric, best] of single && run.tiles.length ? [['loss', 'low'], ['accuracy', 'high']] : []) {
  const one = curves.find(({chart, series, low}) => chart === metric && series && series !== 'train' && low);
  const prefix = one?.series === 'validation' ? '' : one?.series + ' ';
  if (one) addTile(`best ${prefix}${metric}`, one[best][best], 'at update ' + number(one[best][best + 'At']));
}
const cellsOf = ({name, last, points, low, high}) => {
  const cell = (value, update) => number(value)
    + (update === undefined ? '' : (isMemory(name) ? ' ' + unitName : '') + ' at ' + number(update));
  return [name, cell(last, points.at(-1).last), cell(low?.low, low?.lowAt), cell(high?.high, high?.highAt)];
};
const curveRows = runs.flatMap(({name, curves}) => [...(name ? [[name]] : []), ...curves.map(cellsOf)]);
if (charts.length) addTable('Curves', [['', 'last', 'lowest', 'highest'], ...curveRows]);
addTable('Summary', run.numbers.map(([name, value, text]) => [name, text || number(value)]));
addTable('Settings', run.settings);
if (isRunning) setTimeout(() => location.reload(), 1000 * run.refresh);
</script>
</body>
</html>
)html";

}  // namespace gradaccum::detail
