# SPDX-License-Identifier: Apache-2.0
"""Writes data/tokenizer.json, tokenizer_ids.json and tokenizer_kinds.json: the ids that Hugging Face's `tokenizers`
(0.23.3) gives for strings that are hard to split.

tokenizer.json is of BLOOM's kind, trained on the first thousand strings of tokenizer_ids.json; the kinds are small
files by hand: merges of both forms, bytes without a token, added tokens of every sort.
"""
import json
import pathlib
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DATA = pathlib.Path(__file__).parent / "data"
SPLIT = " ?[^(\\s|[.,!?…。，、।۔،])]+"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
TRAINED_ON, COUNT = 1000, 2000

SENTENCES = """The film was not as bad as I had feared, and the last twenty minutes were really moving!
What a waste of time (and of money)... I walked out after half an hour.
<br /><br />I liked it. <br /><br />The music, though, was <i>awful</i>: 3/10, or 4/10 at most?
It's [great] {really} "great" - don't you think so? They've said they'll come; he'd rather not.
In 1999, the 2nd part cost $1,234,567.89 (12.5% more) at 10:30 a.m.
Der Regisseur weiß genau, was er will, und die Schauspieler spielen großartig über zwei Stunden hinweg.
Ce film n'est pas un chef-d'œuvre, mais l'été dernier où j'ai ri, c'était là : à voir !
¿Quién dijo que las películas de acción eran aburridas? ¡Qué niño más pequeño, mañana será otro día!
O filme não é tão mau assim; as canções são belíssimas e o coração bate mais forte.
Phim này không hay lắm nhưng diễn viên chính đóng rất tốt, đáng để xem một lần.
Это был очень хороший фильм, но конец показался мне слишком длинным и печальным.
Η ταινία ήταν πολύ καλή, αλλά το τέλος της με άφησε με πολλές απορίες.
這部電影很好看，演員都很出色。你覺得怎麼樣？我們明天再去看、好嗎……
这是一部关于家庭和爱情的电影，导演的手法非常细腻。很多人都哭了！
この映画はとても面白かったです。音楽も、演技も、すばらしい！もう一度見たいと思います。
이 영화는 정말 재미있었습니다. 배우들의 연기도 훌륭했고, 음악도 아름다웠어요!
यह फ़िल्म बहुत अच्छी थी। कलाकारों ने कमाल का काम किया है, और संगीत भी सुंदर है।
এই সিনেমাটি খুব ভালো ছিল। গান গুলোও চমৎকার, আমি আবার দেখতে চাই।
یہ فلم بہت اچھی تھی۔ کہانی دلچسپ ہے، اور اداکاری شاندار؟
كان هذا الفيلم رائعًا، والممثلون قدّموا أداءً مذهلًا، لكن النهاية كانت حزينة.
הסרט הזה היה נהדר, והשחקנים שיחקו יפה מאוד; לא ראיתי סרט כזה שנים.
இந்தப் படம் மிகவும் நன்றாக இருந்தது, பாடல்களும் இனிமையாக இருந்தன.
Filamu hii ilikuwa nzuri sana, lakini mwisho wake ulinihuzunisha kidogo.
ภาพยนตร์เรื่องนี้สนุกมาก นักแสดงเล่นได้ดีมากจริงๆ
def area(r):\n    if r < 0:\n        raise ValueError("r")\n    return 3.14159 * r ** 2\n
for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];  // a comment\n}\n
{"name": "value", "list": [1, 2, 3], "nested": {"a": null}}\r\n
https://example.org/a/path?query=1&other=%20two#part someone@example.org /usr/share/doc/
    four spaces before, and three after   \n\n\n  and lines between\t\tand tabs
😀😃 great!!! 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 ❤️ ☃ ™ © €100 £20 ¥3000 ½ ² x³""".replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")

WHITE = [chr(c) for c in [*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]]
NEARLY_WHITE = [chr(c) for c in [0x1C, 0x1D, 0x1E, 0x1F, 0x180E, 0x200B, 0x200C, 0x200D, 0x200E, 0x200F, 0x202A, 0x202E,
                                 0x2060, 0x2066, 0xFEFF, 0xAD, 0x61C, 0x3164, 0x2800, 0xFFA0]]
EXCLUDED = list("(|).,!?…。，、।۔،")
NEARLY_EXCLUDED = list("[]{}<>;:'\"-_/\\¡¿·․‥⋯．｡､﹐﹒！？（）॥؟؛«»“”‘’")
COMBINING = [chr(c) for c in [0x300, 0x301, 0x308, 0x327, 0x483, 0x591, 0x64B, 0x670, 0x93C, 0x94D, 0xE31, 0x1AB0, 0x20D0, 0x20E3,
                              0x302A, 0xFE0F, 0xFE00, 0xE0100, 0x1D165]]
EMOJI = ["😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷", "1️⃣", "❤️", "\U0001F9D1\u200D\U0001F680"]
ODD = [chr(c) for c in [0, 1, 8, 0x1B, 0x7F, 0x80, 0x9F, 0xFF, 0x100, 0x143, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xF8FF, 0xFDD0,
                        0xFFFC, 0xFFFD, 0xFFFE, 0xFFFF, 0x10000, 0x1FFFE, 0xE0001, 0xF0000, 0x10FFFF]]
ADDED = [*SPECIAL, "<sep>", "<s", "s>", "pad>", "<<pad>>", "New York", "naïve", "</s></s>", " <s> "]
WORDS = [word for sentence in SENTENCES.split("\n") for word in sentence.split(" ")]
LETTERS = list("aabcdefgeiouABZ019éßñøžığΩяжשمनকத한漢のกǅﬁ𝒳𐍈")
EVERYTHING = [WHITE, NEARLY_WHITE, EXCLUDED, NEARLY_EXCLUDED, COMBINING, EMOJI, ODD, ADDED, WORDS, LETTERS, LETTERS, [" "], [" ", "  "]]


def any_character(rnd):
    while True:
        c = chr(rnd.choice([rnd.randrange(0x250), rnd.randrange(0x3100), rnd.randrange(0x10000), rnd.randrange(0x110000)]))
        if unicodedata.category(c) != "Cs":
            return c


def natural(rnd):
    sentences = SENTENCES.split("\n")
    words = [word for sentence in rnd.sample(sentences, rnd.randint(1, 2)) for word in sentence.split(" ")]
    start = rnd.randrange(len(words))
    return rnd.choice(["", " "]) + " ".join(words[start : start + rnd.randint(3, 14)])


def mixed(rnd):
    return "".join(rnd.choice(rnd.choice(EVERYTHING)) for _ in range(rnd.randint(1, 12)))


def between_letters(rnd):
    c = rnd.choice([any_character(rnd), *(rnd.choice(kind) for kind in (WHITE, NEARLY_WHITE, EXCLUDED, NEARLY_EXCLUDED, ODD))])
    return f"a{c}b {c} {c}{c}c  {c}"


def run(rnd):
    return rnd.choice(rnd.choice(EVERYTHING)) * rnd.choice([2, 3, 7, 16, 17, 33, 64, 65, 130]) + rnd.choice(["", " a", "b", "\n"])


def anything(rnd):
    return "".join(any_character(rnd) for _ in range(rnd.randint(1, 10)))


def strings(rnd, count):
    """Returns a number of different strings of all kinds; the first ones are the unchanged sentences."""
    sorts = [natural] * 6 + [mixed] * 6 + [between_letters] * 3 + [run] * 2 + [anything]
    found = dict.fromkeys(["", " ", "\n", "\0", "a\0b", *SENTENCES.split("\n")])
    while len(found) < count:
        text = rnd.choice(sorts)(rnd)
        if len(text) <= 400:
            found[text] = None
    return list(found)


def with_parts_of_bloom(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
    ])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=False)
    return tokenizer


def trained(texts, vocabulary_size):
    tokenizer = with_parts_of_bloom(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def by_hand(tokens, merges, added=(), **options):
    """Returns a tokenizer.json as a Python value, with the given tokens and merges instead of trained ones."""
    tokenizer = with_parts_of_bloom(Tokenizer(models.BPE(vocab={}, merges=[])))
    tokenizer = json.loads(tokenizer.to_str())
    tokenizer["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges, **options}
    known = {token: i for i, token in enumerate(tokens)}
    for token in added:
        known.setdefault(token.content, len(known))
    tokenizer["added_tokens"] = [
        {"id": known[token.content], "content": token.content, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": token.normalized, "special": token.special} for token in added]
    return tokenizer


def kinds():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    letters = list("abcdĠ.")
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    pairs = [["a", "b"], ["c", "d"], ["ab", "cd"], ["Ġ", "a"], ["b", "c"], ["a", "a"], ["aa", "aa"], ["Ġa", "b"], [".", "."]]
    results = [a + b for a, b in pairs]
    everything = [*SPECIAL, *alphabet, *results]
    yield "merges as pairs", by_hand(everything, pairs, special)
    yield "merges as strings", by_hand(everything, ["#version: 0.2", *(" ".join(pair) for pair in pairs)], special)
    yield "merges backwards", by_hand(everything, pairs[::-1], special)
    yield "the last of equal merges counts", by_hand(everything, pairs + pairs[:1], special)
    yield "two ways to one token", by_hand([*alphabet, "ab", "bc", "abc"], [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]])
    yield "bytes without a token are left out", by_hand([*letters, *results], pairs)
    yield "bytes without a token are unknown", by_hand(["<unk>", *letters, *results], pairs, unk_token="<unk>")
    yield "the unknown token merges", by_hand(["?", *letters, *results, "a?", "??"], [*pairs, ["a", "?"], ["?", "?"]], unk_token="?")
    yield "whole pieces first", by_hand([*alphabet, "ab", "abab", "abc", "Ġabab", "...", "Ã©x"], [["a", "b"]], ignore_merges=True)
    yield "no merges", by_hand(alphabet, [])
    yield "no tokens", by_hand([], [])
    yield "empty prefix and suffix", by_hand(everything, pairs, special, continuing_subword_prefix="", end_of_word_suffix="")
    yield "added tokens", by_hand(everything, pairs, [
        *special, *(AddedToken(content, normalized=normalized) for content, normalized in [
            ("ab", False), ("abc", False), ("bcd", False), ("bcda", True), ("cd", True), (" a", True), ("é", True), ("  ", False),
            ("New York", True), ("<", True), ("\n", False), ("dd\0", True), ("漢字", False), ("漢", True)])])


def ids_of(tokenizer, text):
    return tokenizer.encode(text).ids


def write(name, value):
    (DATA / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def invalid_utf8(rnd):
    """Returns bytes in hexadecimal with the text that Python reads."""
    parts = [b"\x80", b"\xbf", b"\xc0\x80", b"\xc2", b"\xe0\x80\x80", b"\xe2\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xf0\x80\x80\x80",
             b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xff", b"a", b" ", b".", "é".encode(), "漢".encode(), "😀".encode()]
    for _ in range(150):
        text = b"".join(rnd.choice(parts) for _ in range(rnd.randint(1, 6)))
        yield text.hex(), text.decode(errors="replace")


def outside_words():
    """Returns the code points that the expression never includes in a word."""
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated", invert=False)
    return [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and len(split.pre_tokenize_str(f"a{chr(c)}b")) != 1]


def main():
    DATA.mkdir(exist_ok=True)
    rnd = random.Random(9)
    texts = strings(rnd, COUNT)
    tokenizer = trained(texts[:TRAINED_ON], 1200)
    tokenizer.add_tokens(["<sep>", "New York", AddedToken("naïve", normalized=False)])
    write("tokenizer.json", json.loads(tokenizer.to_str()))
    write("tokenizer_ids.json", {
        "outside_words": outside_words(),
        "texts": [[text, ids_of(tokenizer, text)] for text in texts],
        "invalid_utf8": [[code, text, ids_of(tokenizer, text)] for code, text in invalid_utf8(rnd)],
    })
    few = ["abcd", "aaaaaaaa", " abab  ab", "éx é", "...", "ab<s>cd</s>", "New York", "dd\0d", *(
        "".join(rnd.choice([*"aaabbccdd  .é漢字\n?<", "ab", "<s>"]) for _ in range(rnd.randint(1, 24))) for _ in range(60))]
    write("tokenizer_kinds.json", [
        {"name": name, "tokenizer": value, "texts": [[text, ids_of(Tokenizer.from_str(json.dumps(value)), text)] for text in few]}
        for name, value in kinds()])


if __name__ == "__main__":
    main()
