"""Chat templates are programs of strangers: none runs for long, takes all memory, or holds up another."""

import contextlib
import itertools
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from aioengine.errors import EngineClosed, EngineOverloaded, InvalidRequest
from aioengine.text.chat_template import render_template
from aioengine.text.lanes import MAX_OVERDUE, Lanes

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS_IF_SLOW = (
    "{% for m in messages if m.content == 'slow' %}"
    + LOOPS
    + "{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
DOUBLES = "{% set ns = namespace(x='x', l=[1]) %}{% for i in range(99) %}{% set VAR %}{% endfor %}{{ ns.x }}"


def render(template: str, content: str = "hi", *, lanes: Lanes | None = None) -> str:
    messages = [{"role": "user", "content": content}]
    return render_template(template, messages, lanes or Lanes(), add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        LOOPS,
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 40 + "{% endcall %}" * 40,
        "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.next() and '' }}"
        "{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ (range(99999) | map('string') | list)[:0] and '' }}{% endfor %}",
    ],
)
def test_a_template_that_loops_is_stopped_at_its_deadline(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"takes longer than 0.2 s \(chat_template_timeout_s\)"):
        render(template, lanes=Lanes(0.2, clock=itertools.count(step=0.001).__next__))


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
        "{{ [1] | tojson(indent=1000000) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ range(99999) | map('center', 1000000) | list | length }}",
        "{{ ([[1] * 100000] * 1000) | sum(start=[]) }}",
        "{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 1000000 }}{% endfor %}{% endset %}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "".join(f"{{% set x{i} = 'x' * 16000000 %}}" for i in range(300)),
    ],
)
def test_a_template_that_asks_for_all_memory_gets_none(template: str) -> None:
    # Nothing of the size was made: each is refused in milliseconds.
    with pytest.raises(
        InvalidRequest, match=r"chat template does not take these messages: it (makes|calls|formats|com|ind)"
    ):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
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


def test_long_messages_may_be_written_whole_and_more_than_once() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.content | trim }}{% endfor %}"
    assert len(render(template, "x" * 20_000_000)) == 40_000_000


def test_others_are_rendered_while_some_take_long() -> None:
    thread = threading.local()

    def render_slow() -> str:
        thread.is_slow = True
        return render(LOOPS_IF_SLOW, "slow", lanes=shared)

    def cpu_clock() -> float:
        """A quick one computes nothing: else a garbage collection in its thread would make it overdue."""
        return time.thread_time() if hasattr(thread, "is_slow") else 0.0

    shared = Lanes(3600, cpu_clock=cpu_clock)
    with ThreadPoolExecutor(MAX_OVERDUE + 1) as threads, contextlib.closing(shared):
        slow = [threads.submit(render_slow) for _ in range(MAX_OVERDUE)]
        # Each of the slow ones may be quick for 20 ms of computing, and gives way then.
        quick = [threads.submit(render, LOOPS_IF_SLOW, f"quick {i}", lanes=shared) for i in range(20)]
        assert [future.result(30) for future in quick] == [f"quick {i}" for i in range(20)]
        assert not any(future.done() for future in slow)
        shared.close()
        for future in slow:
            with pytest.raises(EngineClosed):
                future.result(30)


def test_of_those_that_take_long_there_are_only_so_many() -> None:
    later_s = 0.0
    shared = Lanes(3600, clock=lambda: time.monotonic() + later_s)
    with ThreadPoolExecutor(MAX_OVERDUE + 1) as threads, contextlib.closing(shared):
        slow = [threads.submit(render, LOOPS, lanes=shared) for _ in range(MAX_OVERDUE + 1)]
        refused, others = wait(slow, 10, FIRST_COMPLETED)
        later_s = 3600
        assert [type(future.exception()) for future in refused] == [EngineOverloaded]
        for future in others:
            with pytest.raises(InvalidRequest, match="takes longer than 3600 s"):
                future.result(30)
        assert all(shared.overdue_slots.acquire(blocking=False) for _ in range(MAX_OVERDUE)), "all are free again"
        assert render("ok", lanes=shared) == "ok"


def test_closed_lanes_end_what_runs_and_admit_no_more() -> None:
    is_running = threading.Event()

    def cpu_clock() -> float:
        is_running.set()
        return 0.0

    shared = Lanes(3600, cpu_clock=cpu_clock)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(render, LOOPS, lanes=shared)
        assert is_running.wait(10)
        shared.close()
        assert type(running.exception(10)) is EngineClosed
    with pytest.raises(EngineClosed):
        render("ok", lanes=shared)


@pytest.mark.parametrize(
    "template",
    [
        *[f"{{{{ ('a' * 200000).{name}('ab' ~ 'a' * 100000) }}}}" for name in ("rfind", "rindex", "rsplit")],
        "{{ ('a' * 200000).rpartition('ab' ~ 'a' * 100000) }}",
        "{{ ('a' * 4000000).encode().rfind(('ab' ~ 'a' * 100000).encode()) }}",
        "{{ ('a' * 4000000).strip('b' * 100000 ~ 'a') }}",
        "{{ ('a' * 4000000) | trim('b' * 100000 ~ 'a') }}",
        "{{ ('a ' * 2000000) | title }}",
        "{{ ('a ' * 2000000) | wordcount }}",
        "{{ 'a' | wordwrap(1) }}",
        "{{ '<!-- -->' | striptags }}",
        "{{ [1] | pprint }}",
        "{{ range(50000) | batch(1) | list | sum(start=[]) }}",
        "{{ [[1], [2]] | sum(start=()) }}",
        "{{ 5 | round(-100000) }}",
        "{{ ('%9999d' * 60000) % ((1,) * 60000) }}",
        "{{ '%(a)99999999d' % {'a': 1} }}",
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
        "{{ ('{0}' * 100000).format('x' * 100000) }}",
        "{% set ns = namespace(l=[1] * 20000) %}{% for i in range(60) %}{% set ns.l = [ns.l] %}{% endfor %}"
        "{{ ns.l | tojson(indent=64) }}",
    ],
)
def test_nothing_takes_long_over_little(template: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"it makes|it calls|it formats|No filter named"):
        render(template)
    assert time.thread_time() - began < 2  # of some 20 ms


@pytest.mark.parametrize("use", ["dict.fromkeys(KEYS)", "KEYS | unique | list", "dict(KEYS | batch(2))"])
def test_keys_that_all_have_one_hash_are_counted(use: str) -> None:
    keys = f"range(0, {60000 * (2**61 - 1)}, {2**61 - 1})"
    template = "{{ (" + use.replace("KEYS", f"({keys} | map('int'))" if "range" in use else keys) + ") | length }}"
    with pytest.raises(InvalidRequest, match=r"takes longer|number above|more than"):
        render(template, lanes=Lanes(0.2))


def test_what_templates_do_with_long_contents_is_done() -> None:
    content = "<think>\n" + "word " * 200_000 + "</think>\nyes  "
    template = (
        "{% set c = messages[0].content %}{{ c.split('</think>')[-1].lstrip('\n').rstrip() }} {{ c.rfind('<think>') }} "
        "{{ c.rsplit('</think>', 1)[-1] | trim }} {{ c in c }} {{ c.replace(c, 'x') }} {{ 'it is' | title }}"
    )
    assert render(template, content) == "yes 0 yes True x It Is"
