"""Chat templates are programs of strangers: none runs for long, takes all memory, or holds the event loop."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioengine.errors import EngineClosed, InvalidRequest
from aioengine.text import template_limits
from aioengine.text.chat_template import render_template
from aioengine.text.template_limits import TemplateLimits

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='x', l=[1]) %}{% for i in range(99) %}{% set VAR %}{% endfor %}{{ ns.x }}"


def render(template: str, content: str = "hi", *, limits: TemplateLimits | None = None) -> str:
    messages = [{"role": "user", "content": content}]
    return render_template(template, messages, limits or TemplateLimits(), add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        LOOPS,
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 40 + "{% endcall %}" * 40,
        "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() and '' }}"
        "{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ (range(9999) | map('string') | list)[:0] and '' }}{% endfor %}",
        "{{ range(2, 99999) | select('in', [1] * 1000) | list }}",
        "{% set l = [1] * 1000 %}{{ [" + "2 in l," * 4000 + "] }}",
        "{% set k = (1,) * 1000 %}{% set d = {k: 1} %}{{ [" + "d[k]," * 4000 + "] }}",
    ],
)
def test_a_template_that_loops_is_stopped_at_its_deadline(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"takes longer than 0.2 s \(chat_template_timeout_s\)"):
        render(template, limits=TemplateLimits(0.2, clock=itertools.count(step=0.001).__next__))


def test_a_template_that_loops_is_stopped_after_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 10_000)
    with pytest.raises(InvalidRequest, match="it takes more than 10000 steps"):
        render(LOOPS, limits=TemplateLimits(clock=lambda: 0.0))


def test_a_template_that_takes_long_pauses_for_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses = 0.0, []

    def clock() -> float:
        nonlocal now_s
        now_s += 0.0005
        return now_s

    monkeypatch.setattr(template_limits.time, "sleep", lambda _: pauses.append(now_s))
    with pytest.raises(InvalidRequest, match="takes longer"):
        render(LOOPS, limits=TemplateLimits(0.2, clock=clock))
    assert len(pauses) > 50
    assert max(after - before for before, after in itertools.pairwise(pauses)) < 0.005


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**9 }}",
        "{{ ([1] * 10**9) | length }}",
        DOUBLES.replace("VAR", "ns.x = ns.x + ns.x"),
        DOUBLES.replace("VAR", "ns.x = ns.x ~ ns.x"),
        DOUBLES.replace("VAR", "ns.l = [ns.l, ns.l]"),
        DOUBLES.replace("VAR", "ns.l = {'a': ns.l, 'b': ns.l}"),
        DOUBLES.replace("VAR", "ns.l = (ns.l, ns.l)"),
        "{{ (['x' * 100000] * 100000) | join }}",
        "{{ range(99999) | join('x' * 1000000) }}",
        "{{ 'x'.join(range(99999) | map('center', 1000000)) }}",
        "{{ ('x' * 10000) | replace('x', 'x' * 10000) }}",
        "{{ ('x' * 10000) | replace(new='x' * 10000, old='x') }}",
        "{{ ('x' * 10000).replace('', 'x' * 10000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 10 ** 10 ** 10 ** 10 ** 10 }}",
        "{% set ns = namespace(x=10) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ (1).to_bytes(10000000000) }}",
        "{{ ('\n' * 1000000) | indent(1000000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ range(9999) | list | tojson(separators=('x' * 1000000, ':')) }}",
        "{{ strftime_now('%c' * 500000) }}",
        "{% set ns = namespace(x='x' * 1000000) %}{{ ([ns] * 60000) | join(attribute='x') }}",
        "{% set ns = namespace(x='x' * 1000000) %}{{ ('{0.x}' * 10000).format(ns) }}",
        DOUBLES.replace("VAR", "ns.l = {'a': ns.l.items() if i else 1, 'b': ns.l.items() if i else 1}"),
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ range(99999) | map('center', 1000000) | list | length }}",
        "{{ ([[1] * 100000] * 1000) | sum(start=[]) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
        "{% set x = 'x' * 1000000 %}{% set y %}{% for i in range(99999) %}{{ x[1:] }}{% endfor %}{% endset %}",
        "{% set x = ['x' * 1000] * 1000 %}{% set y %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
        "".join(f"{{% set x{i} = 'x' * 16000000 %}}" for i in range(300)),
        "{{ ([10 ** 4000] * 100000) | tojson }}",
        "{{ ([10 ** 4000] * 100000) | string }}",
        "{{ ([10 ** 4000] * 100000) | join }}",
        "{{ ([(('x' * 1000000) | safe).upper] * 1000) | string }}",
        "{% macro " + "m" * 10000 + "() %}{% endmacro %}{{ ([" + "m" * 10000 + "] * 10000) | string }}",
        "{{ ([{'x' * 100000: 1}.keys() - []] * 10000) | string }}",
        "{{ ([{'x' * 100000: 1}.keys().mapping] * 10000) | string }}",
        "{{ ('x\n' * 500000) | indent(63) }}",
        "{{ ([1, 2, 3] * 1000) | groupby('a', default='x' * 1000000) | list }}",
        "{{ [1] | batch(7000000, 'x') | list }}",
        "{{ strftime_now('%99999999d' * 90000) }}",
        "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
        "{{ '%(a%b)999999999d' % {'a%b': 1} }}",
    ],
)
def test_a_template_that_asks_for_all_memory_gets_none(template: str) -> None:
    # Nothing of the size was made: each is refused in milliseconds.
    with pytest.raises(InvalidRequest, match=r"it (makes|formats)|access to attribute"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ joiner.__init__.__globals__ }}",
        "{% include 'x' %}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_has_no_way_out(template: str) -> None:
    with pytest.raises(InvalidRequest):
        render(template)


def test_a_template_that_would_take_long_to_compile_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the template has more than 262,144 characters"):
        render("{% set a = 1 %}" * 20_000)


def test_long_messages_may_be_written_whole_and_more_than_once() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.content | trim }}{% endfor %}"
    assert len(render(template, "x" * 20_000_000)) == 40_000_000


def test_closed_limits_end_what_runs_and_admit_no_more() -> None:
    is_running = threading.Event()

    def clock() -> float:
        is_running.set()
        return 0.0

    limits = TemplateLimits(3600, clock=clock)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(render, LOOPS, limits=limits)
        assert is_running.wait(10)
        limits.is_closed = True
        assert type(running.exception(10)) is EngineClosed
    with pytest.raises(EngineClosed):
        render("ok", limits=limits)


@pytest.mark.parametrize(
    "template",
    [
        *[f"{{{{ ('a' * 200000).{name}('ab' ~ 'a' * 100000) }}}}" for name in ("rfind", "rindex", "rsplit")],
        "{{ ('a' * 200000).rpartition('ab' ~ 'a' * 100000) }}",
        "{{ ('a' * 1000000).encode().rfind(('ab' ~ 'a' * 100000).encode()) }}",
        "{{ ('a' * 1000000).strip('b' * 100000 ~ 'a') }}",
        "{{ ('a' * 1000000) | trim('b' * 100000 ~ 'a') }}",
        "{{ ('a ' * 400000) | title }}",
        "{{ ('a ' * 400000) | wordcount }}",
        "{{ 'a' | wordwrap(1) }}",
        "{{ '<!-- -->' | striptags }}",
        "{{ [1] | pprint }}",
        "{{ range(50000) | batch(1) | list | sum(start=[]) }}",
        "{{ (('<!--' * 200000) | safe).striptags() }}",
        "{{ {}.fromkeys(range(60000)) }}",
        "{{ ('%9999d' * 60000) % ((1,) * 60000) }}",
        "{{ '%(a)99999999d' % {'a': 1} }}",
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
        "{{ ('{0}' * 100000).format('x' * 100000) }}",
        "{{ ('%(' * 500000) % () }}",
        "{{ ([messages] * 5000) | sort(attribute='0.' * 4000) }}",
        "{{ ([messages] * 5000) | map(attribute='0.' * 4000) | list }}",
        "{{ ([messages] * 5000) | selectattr('0.' * 4000) | list }}",
        "{% set ns = namespace(l=[1] * 20000) %}{% for i in range(60) %}{% set ns.l = [ns.l] %}{% endfor %}"
        "{{ ns.l | tojson(indent=64) }}",
    ],
)
def test_nothing_takes_long_over_little(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"it (makes|formats)|No filter named|access to attribute"):
        render(template)
    assert time.thread_time() - began < 2  # of some 20 ms


@pytest.mark.parametrize("use", ["KEYS | unique | list", "dict(KEYS | batch(2))"])
def test_keys_that_all_have_one_hash_are_counted(use: str) -> None:
    keys = f"range(0, {60000 * (2**61 - 1)}, {2**61 - 1})"
    template = "{{ (" + use.replace("KEYS", f"({keys} | map('int'))" if "range" in use else keys) + ") | length }}"
    with pytest.raises(InvalidRequest, match=r"takes longer|more than"):
        render(template, limits=TemplateLimits(0.2))


def test_what_templates_do_with_long_contents_is_done() -> None:
    content = "<think>\n" + "word " * 200_000 + "</think>\nyes  "
    template = (
        "{% block whole %}{% for m in messages %}{% set c = m.content %}"
        "{{ c.split('</think>')[-1].lstrip('\n').rstrip() }} {{ c.rfind('<think>') }} "
        "{{ c.rsplit('</think>', 1)[-1] | trim }} {{ c in c }} {{ c.replace(c, 'x') }} {{ 'it is' | title }}"
        "{% endfor %}{% endblock %}"
    )
    assert render(template, content) == "yes 0 yes True x It Is"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% macro m(l) %}{{ l.index }}{% endmacro %}{% for x in 'abc' %}{{ m(loop) }}{% endfor %}", "123"),
        ("{{ '{name}: {text:>5} {value}'.format(name='a', text='b', value=1.5) }}", "a:     b 1.5"),
        ("{{ '%(a)s, 100%% (%(b)3d)' % {'a': 'x', 'b': 1} }}", "x, 100% (  1)"),
        (
            "{{ 1 < 2 < 3 }}{{ 'h' in messages[0].content }}{{ 'a' not in ['b'] }}{{ 'A' is lower }}",
            "TrueTrueTrueFalse",
        ),
        ("{{ '%s: %(a)s' if false else '%5.1f|%s' % (1.25, 'x') }}", "  1.2|x"),
        ("{% for x in 'ab' %}{{ x.replace('a', 'b') }}{{ x | replace('b', 1) }}{% endfor %}", "bab1"),
        ("{{ [[1], [2, 3]] | sum(start=[]) | join('-') }}{{ [1, 2] | join }}", "1-2-312"),
        ("{{ messages | join('|', attribute='content') }}{{ messages | map(attribute='role') | join }}", "hiuser"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        (
            "{{ 2.567 | round(1) }}{{ 5 | round(-100000) }}{{ 1.5 | round(1000000) }}{{ 'a' | center(3) }}|",
            "2.601.5 a |",
        ),
        ("{{ none }}{{ missing }}{{ true }}{{ [1, 'a'] }}{{ 1.0 }}", "NoneTrue[1, 'a']1.0"),
    ],
)
def test_usual_templates_are_rendered_as_by_jinja_alone(template: str, text: str) -> None:
    assert render(template) == text
