import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.core.identity import group_of
from sam_rollout.integrations.verl.request_keys import RequestKeys

PROMPT = [1, 2, 3]


def new(prompt, ordinal):
    return f"{group_of(prompt)}/{ordinal}"


class Loop:
    def __init__(self):
        self.keys = RequestKeys()
        self.under_way = {}
        self.named = {}

    def ask(self, who, prompt):
        chain = self.keys.begin(prompt)
        self.named[who] = chain.name
        self.under_way[who] = chain, list(prompt)

    def answer(self, who, tokens):
        chain, prompt = self.under_way.pop(who)
        self.keys.end(chain, prompt, tokens)
        return prompt + tokens

    def ask_alone(self, who, prompt, tokens):
        self.ask(who, prompt)
        return self.answer(who, tokens)


def test_turns_one_after_the_other_keep_one_name():
    loop = Loop()
    text = loop.ask_alone("first", PROMPT, [4, 5])
    text = loop.ask_alone("second", [*text, 6], [7])
    loop.ask_alone("another text, as long", [9] * len(text), [8])
    assert set(loop.named.values()) == {""}


def test_a_shortened_text_begins_another_name():
    loop = Loop()
    loop.ask_alone("first", PROMPT, [4, 5])
    loop.ask_alone("shorter", [1, 2, 3, 9], [4])
    loop.ask_alone("longer", [1, 2, 3, 9, 4, 5], [4])
    loop.ask_alone("shorter again", PROMPT, [4])
    assert [*loop.named.values()] == ["", "1", "1", "2"]


def test_candidates_at_once_differ_and_go_on_where_they_ended():
    loop = Loop()
    for who in "abc":
        loop.ask(who, PROMPT)
    texts = {who: loop.answer(who, [ord(who)]) for who in "cab"}
    for who in "bca":
        loop.ask(who * 2, [*texts[who], 9])
    assert loop.named["a"] == loop.named["aa"] == ""
    assert loop.named["b"] == loop.named["bb"] == new(PROMPT, 1)
    assert loop.named["c"] == loop.named["cc"] == new(PROMPT, 2)
    loop.ask("failing", PROMPT)
    loop.keys.abandon(loop.under_way.pop("failing")[0])
    loop.ask("again", PROMPT)
    assert loop.named["again"] == new(PROMPT, 4), "a failed request is not continued"


BRANCHES = st.lists(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=4),
    min_size=2, max_size=4,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(branches=BRANCHES, data=st.data())
def test_names_do_not_depend_on_what_ends_first(branches, data):
    def run(order):
        loop, texts, turns = Loop(), {}, [0] * len(branches)
        for agent, _ in enumerate(branches):
            loop.ask((agent, 0), [*PROMPT, 100 + agent])
        for agent in order:
            turn = turns[agent]
            texts[agent] = loop.answer((agent, turn), branches[agent][turn])
            turns[agent] += 1
            if turns[agent] < len(branches[agent]):
                loop.ask((agent, turns[agent]), [*texts[agent], 50])
        return loop.named

    events = [agent for agent, turns in enumerate(branches) for _ in turns]
    one, other = (data.draw(st.permutations(events)) for _ in range(2))
    assert run(one) == run(other)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_two_requests_draw_at_the_same_position(data):
    loop, places, texts, count = Loop(), {}, [PROMPT], itertools.count()
    loop.ask("first", PROMPT)
    loop.ask("at once", PROMPT)
    running = {"first": PROMPT, "at once": PROMPT}
    for _ in range(data.draw(st.integers(1, 12))):
        if running and data.draw(st.booleans()):
            who = data.draw(st.sampled_from(sorted(running)))
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
            prompt = running.pop(who)
            drawn = places.setdefault(loop.named[who], set())
            positions = set(range(len(prompt), len(prompt) + len(tokens)))
            assert not drawn & positions
            drawn |= positions
            texts.append(loop.answer(who, tokens))
        else:
            text = data.draw(st.sampled_from(texts))
            cut = data.draw(st.integers(1, len(text)))
            prompt = [*text[:cut], *data.draw(st.lists(st.integers(0, 1), max_size=2))]
            who = f"request {next(count)}"
            loop.ask(who, prompt)
            running[who] = prompt
