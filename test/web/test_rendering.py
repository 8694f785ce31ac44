"""Formulas, coloured code, task lists and quotes in answers."""

from __future__ import annotations

from test.web.chat_page import ChatPage

CODE = '```python\ndef double(x):  # twice\n    return "2" * x\n```'
SPANS = "return [...document.querySelectorAll('.code pre span')].map((one) => [one.className, one.textContent])"
TAGS = "return [...document.querySelectorAll('.assistant math *')].map((one) => one.localName)"


def test_code_has_the_colours_of_its_language(page: ChatPage) -> None:
    page.will_answer("Colour this", CODE)

    page.send("Colour this")

    assert page.run(SPANS) == [
        ["code-keyword", "def"],
        ["code-call", "double"],
        ["code-comment", "# twice"],
        ["code-keyword", "return"],
        ["code-string", '"2"'],
    ]
    assert page.text(".code pre") == 'def double(x):  # twice\n    return "2" * x'
    colours = page.run(
        "return ['keyword', 'comment', 'string'].map("
        "(kind) => getComputedStyle(document.querySelector('.code-' + kind)).color)"
    )
    assert len(set(colours)) == 3


def test_code_of_an_unknown_language_stays_text(page: ChatPage) -> None:
    page.will_answer("Colour nothing", "```klingon\nif (x) return 'y'\n```")

    page.send("Colour nothing")

    assert page.text(".code pre") == "if (x) return 'y'"
    assert page.run(SPANS) == []


def test_formulas_become_mathml(page: ChatPage) -> None:
    page.will_answer("Formulas", "With $x^2$:\n\n$$\n\\frac{a}{b}\n- \\sqrt{c}\n$$\n\nand \\(\\alpha\\)")

    page.send("Formulas")

    assert page.run(TAGS) == [
        *("msup", "mi", "mn"),
        *("mrow", "mfrac", "mi", "mi", "mo", "msqrt", "mi"),
        "mi",
    ]
    displays = "return [...document.querySelectorAll('math')].map((one) => one.getAttribute('display'))"
    assert page.run(displays) == ["inline", "block", "inline"]
    wide, high = page.run(
        "const box = document.querySelector('mfrac').getBoundingClientRect(); return [box.width, box.height]"
    )
    assert 0 < wide < high  # the browser laid it out as a fraction


def test_a_grid_and_limits_are_laid_out(page: ChatPage) -> None:
    text = "\\[ \\sum_{i=1}^{n} i = \\begin{cases} 1 & x > 0 \\\\ \\text{else} & y \\end{cases} \\]"
    page.will_answer("A grid", text)

    page.send("A grid")

    tags = page.run(TAGS)
    assert tags.count("mtr") == 2
    assert tags.count("mtd") == 4
    assert "munderover" in tags
    below = "const [base, under] = document.querySelector('munderover').children;"
    below += "return under.getBoundingClientRect().top > base.getBoundingClientRect().top"
    assert page.run(below)


def test_money_is_no_formula(page: ChatPage) -> None:
    page.will_answer("Prices", "It costs $5 and then $10, or 100$ in `$x$` code.")

    page.send("Prices")

    assert page.answer == "It costs $5 and then $10, or 100$ in $x$ code."
    assert page.run(TAGS) == []


def test_half_a_formula_is_text_until_it_ends(page: ChatPage) -> None:
    page.will_answer("Slow formula", "$$\nx^2\n$$ " + "word " * 100, step_s=0.02)
    page.start("Slow formula")
    page.wait(lambda: page.answer.startswith("$$"))
    page.wait_for_answer()

    assert page.answer.startswith("x2")


def test_a_task_list_shows_what_is_done(page: ChatPage) -> None:
    page.will_answer("Tasks", "- [ ] write\n- [x] **test**\n- plain [x]")

    page.send("Tasks")

    boxes = "return [...document.querySelectorAll('.task-box')].map((one) => one.getAttribute('aria-label'))"
    assert page.run(boxes) == ["To do", "Done"]
    assert page.text(".assistant ul") == "writetestplain [x]"
    assert page.text(".task strong") == "test"


def test_a_quote_has_a_bar_beside_it(page: ChatPage) -> None:
    page.will_answer("A quote", "> first\n> second\n\nafter")

    page.send("A quote")

    assert page.text(".assistant blockquote") == "firstsecond"
    assert page.run("return getComputedStyle(document.querySelector('blockquote')).borderLeftWidth") == "3px"
