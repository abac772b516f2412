// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gradaccum/detail/watching/page_content.hpp>

#include <gradaccum/detail/build/inline.hpp>
#include <gradaccum/detail/watching/html_text.hpp>
#include <gradaccum/detail/watching/number_text.hpp>
#include <gradaccum/detail/watching/page_style.hpp>
#include <gradaccum/detail/watching/svg_chart.hpp>
#include <gradaccum/progress_line.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <utility>

namespace gradaccum::detail {

/// How a run ended, as a class of the style, and for people.
GRADACCUM_INLINE std::pair<std::string_view, std::string_view> names_of_end(const std::optional<RunEnd>& end) {
  if (!end) return {"running", "running"};
  switch (*end) {
    case RunEnd::finished:
      return {"finished", "finished"};
    case RunEnd::stopped:
      return {"stopped", "stopped early"};
    default:
      return {"interrupted", "interrupted"};
  }
}

/// 100 % is only said when it is over.
GRADACCUM_INLINE std::string share_text(double fraction) { return fmt::format("{:.0f} %", std::floor(100 * fraction)); }

/// The policy of its content lets nothing run and nothing be fetched; of styles it lets in the one whose hash it names.
GRADACCUM_INLINE std::string page_head(const PageContent& content) {
  const bool shows_share = !content.end && content.fraction;
  std::string html = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  html += fmt::format(
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{}'; base-uri "
      "'none'; form-action 'none'\">\n",
      page_style_hash);
  html += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  html += "<meta name=\"color-scheme\" content=\"light dark\">\n";
  if (!content.end)
    html += fmt::format("<meta http-equiv=\"refresh\" content=\"{:.0f}\">\n", std::clamp(content.refresh, 1.0, 3600.0));
  html +=
      "<title>" + (shows_share ? share_text(*content.fraction) + " · " : "") + html_text(content.title) + "</title>\n";
  return html.append("<style>").append(page_style).append("</style>\n</head>\n");
}

GRADACCUM_INLINE std::string page_progress(const PageContent& content) {
  std::string html, text;
  const auto say = [&text](const std::string& part) { text += (text.empty() ? "" : " · ") + part; };
  if (content.fraction) {
    html = fmt::format("<progress max=\"1\" value=\"{:.4f}\" aria-label=\"done\"></progress>\n", *content.fraction);
    say(share_text(*content.fraction));
  }
  if (content.seconds) say((content.end ? "" : "for ") + duration_text(*content.seconds));
  if (!content.end && content.seconds_left) say("<strong>" + duration_text(*content.seconds_left) + " left</strong>");
  return html + "<p class=\"progress\"><span>" + text + "</span><span>written " + html_text(content.written) +
         "</span></p>\n";
}

GRADACCUM_INLINE std::string page_header(const PageContent& content) {
  const auto [kind, name] = names_of_end(content.end);
  const auto reason = content.reason.empty() ? "" : ": " + html_text(content.reason, 300);
  return fmt::format("<header>\n<div class=\"title\"><h1>{}</h1><p class=\"state {}\">{}{}</p></div>\n",
                     html_text(content.title), kind, name, reason) +
         page_progress(content) + "</header>\n";
}

GRADACCUM_INLINE std::string page_tiles(const PageContent& content) {
  if (content.tiles.empty()) return "";
  std::string html = "<dl class=\"tiles\">\n";
  for (auto& [name, text, note] : content.tiles)
    html += fmt::format("<div><dt>{}</dt><dd>{}</dd><dd class=\"note\">{}</dd></div>\n", html_text(name, 60),
                        html_text(text, 40), html_text(note, 80));
  return html + "</dl>\n";
}

GRADACCUM_INLINE std::string page_charts(const PageContent& content) {
  constexpr std::size_t most = 100;
  std::string html = "<section class=\"charts\">\n<h2>Curves, by update</h2>\n";
  const auto charts = charts_of(content.runs);
  for (std::size_t i = 0; i < charts.size() && i < most; ++i) html += svg_chart(charts[i], i);
  if (charts.size() > most)
    html += fmt::format("<p class=\"note\">{} more are left out.</p>\n",
                        count_text(static_cast<std::int64_t>(charts.size() - most)));
  if (charts.empty()) html += "<p class=\"note\">There are none yet.</p>\n";
  return html + "</section>\n";
}

/// The exact value is in bytes, where people read MB.
GRADACCUM_INLINE std::string curve_cell(const std::optional<CurvePoint>& point, std::string_view what, bool is_memory) {
  if (!point) return fmt::format("<td data-what=\"{}\">–</td>", what);
  const auto text = is_memory ? number_text(point->value / (1 << 20)) + " MB" : number_text(point->value);
  return fmt::format("<td data-what=\"{}\" data-value=\"{}\" data-update=\"{}\">{}<small>at {}</small></td>", what,
                     exact_text(point->value), point->update, text, count_text(point->update));
}

/// Where a long name may go on in the next line.
GRADACCUM_INLINE std::string breakable_text(const std::string& name) {
  std::string html;
  for (const char c : html_text(name)) {
    html += c;
    if (c == '/' || c == '_') html += "<wbr>";
  }
  return html;
}

GRADACCUM_INLINE std::string curve_row(const PageRun& run, const std::string& name, const Curve& curve) {
  const bool is_memory = CurveName(name).chart == memory_chart;
  return fmt::format("<tr data-run=\"{}\" data-curve=\"{}\"><th scope=\"row\">{}</th>", html_text(run.name),
                     html_text(name), breakable_text(name)) +
         curve_cell(curve.empty() ? std::nullopt : std::optional(curve.last()), "last", is_memory) +
         curve_cell(curve.lowest(), "lowest", is_memory) + curve_cell(curve.highest(), "highest", is_memory) +
         "</tr>\n";
}

GRADACCUM_INLINE std::string page_curves(const PageContent& content) {
  constexpr int most = 500;
  std::string html =
      "<section>\n<h2>Numbers of the curves</h2>\n<table class=\"curves\"><thead><tr><th scope=\"col\">Curve</th><th "
      "scope=\"col\">Last</th><th scope=\"col\">Lowest</th><th scope=\"col\">Highest</th></tr></thead>\n<tbody>\n";
  int rows = 0;
  for (auto& run : content.runs) {
    if (!run.name.empty() && !run.curves.empty())
      html += fmt::format("<tr><th class=\"run\" colspan=\"4\" scope=\"colgroup\">{}</th></tr>\n", html_text(run.name));
    for (auto& [name, curve] : run.curves.all())
      if (rows++ < most) html += curve_row(run, name, curve);
  }
  return rows == 0 ? "" : html + "</tbody></table>\n</section>\n";
}

GRADACCUM_INLINE std::string page_numbers(const PageContent& content) {
  if (content.numbers.empty()) return "";
  std::string html = "<section>\n<h2>Summary</h2>\n<table class=\"pairs\"><tbody>\n";
  for (auto& [name, text, exact] : content.numbers)
    html += fmt::format("<tr data-name=\"{0}\"><th scope=\"row\">{0}</th><td data-value=\"{1}\">{2}</td></tr>\n",
                        html_text(name), html_text(exact), html_text(text, 500));
  return html + "</tbody></table>\n</section>\n";
}

GRADACCUM_INLINE std::string page_facts(const PageContent& content) {
  constexpr std::size_t most_characters = 5'000;
  if (content.facts.empty()) return "";
  std::string html = "<section>\n<h2>Settings</h2>\n<table class=\"pairs\"><tbody>\n";
  for (auto& [name, text] : content.facts)
    html += fmt::format("<tr data-name=\"{0}\"><th scope=\"row\">{0}</th><td>{1}</td></tr>\n", html_text(name),
                        html_text(text, most_characters));
  return html + "</tbody></table>\n</section>\n";
}

GRADACCUM_INLINE std::string html_of(const PageContent& content) {
  return page_head(content) + "<body>\n<main>\n" + page_header(content) + page_tiles(content) + page_charts(content) +
         "<div class=\"tables\">\n" + page_curves(content) + page_numbers(content) + page_facts(content) +
         "</div>\n</main>\n</body>\n</html>\n";
}

}  // namespace gradaccum::detail
