"""Traffic such as a small team makes: assistants with long instructions, conversations that go on, documents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.serve.harness import Server

SUPPORT = (
    "You are the support assistant of Brook & Vale, a shop for outdoor equipment. Answer in one or two short "
    "sentences. Be friendly and exact. Orders placed before noon are sent the same day. Returns are free within "
    "thirty days. Tents have a warranty of five years, rucksacks of ten, boots of two. Never promise a date of "
    "delivery. If a customer is upset, apologise once and offer to call them. Prices are in euros and include "
    "tax. The shop in the old mill is open from nine to six, on Saturdays until two. Repairs take a week; soles "
    "take two. Gift cards do not expire. "
)
GUIDE = (
    "You are the guide of a small museum about rivers. Answer in one short sentence. Never invent a number. A "
    "spring is where water leaves the ground. A headwater is where a river begins, far from its mouth. A "
    "tributary flows into a larger river. A confluence is where two rivers meet. A delta is built by what a river "
    "carries to the sea. "
)
CONTRACT = (
    "Summarise the clause that answers the question. CONTRACT OF LEASE. 1. The landlord lets to the tenant the "
    "mill house with the garden and the weir. 2. The lease begins on the first of May and runs for three years. "
    "3. The rent is nine hundred euros, due on the third working day of each month. 4. The tenant keeps the "
    "sluice free of leaves. 5. The landlord keeps the roof and the wheel in repair. 6. No alteration of the bank "
    "without the consent of the water board. 7. The tenant may keep two dogs, and bees. 8. Notice is three months "
    "to the end of a quarter. 9. The deposit is two months' rent and bears interest. 10. The path along the "
    "stream remains open to the public. "
)
QUESTIONS = {
    SUPPORT: (
        "My boots leak after a year.",
        "When will my order arrive?",
        "Can I return a tent that I used once?",
        "Do gift cards expire?",
        "How long does a new sole take?",
        "Are you open on Saturday afternoon?",
    ),
    GUIDE: ("What is a headwater?", "What is a delta?", "Where do two rivers meet?", "What is a tributary?"),
    CONTRACT: ("Who repairs the roof?", "When is the rent due?", "May I keep bees?", "How long is the notice?"),
}
LONE = (
    "Write a haiku about {} on {}.",
    "Translate into French: today there is {} on {}.",
    "List five words that rhyme with {}, then five about {}.",
    "Once upon a time there was {} on {},",
)
THINGS = ("rain", "a heron", "thin ice", "the last ferry", "a red kite", "fog", "the mill wheel", "wild mint")
PLACES = ("a tin roof", "the upper lake", "the weir", "market day", "the long bridge", "a gravel bank", "the border")


def conversations(rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """First turns, in the order in which they come in."""
    asked = [(system, question) for system, questions in QUESTIONS.items() for question in questions]
    rng.shuffle(asked)
    for system, question in asked:
        yield [{"role": "system", "content": system * 2}, {"role": "user", "content": question}]


def send(server: Server, *, n_rounds: int = 2, seed: int = 1, max_tokens: int = 24, lone: int = 1) -> None:
    """Every first turn, ``n_rounds`` times; some conversations go on; ``lone`` times four prompts stand alone."""
    rng = random.Random(seed)
    started = list(conversations(rng))
    plan: list[tuple[str, dict[str, Any]]] = []
    for _ in range(n_rounds):
        rng.shuffle(started)
        plan += [("/v1/chat/completions", {"messages": messages}) for messages in started]
        for prompt in LONE * lone:
            asked = [prompt.format(rng.choice(THINGS), rng.choice(PLACES)) for _ in range(8)]
            plan.append(("/v1/completions", {"prompt": " ".join(asked)}))
    later = [("/v1/chat/completions", {"messages": go_on(messages)}) for messages in started[:6]]
    with ThreadPoolExecutor(3) as pool:
        for path, body in plan + later:
            pool.submit(server.post, path, {**body, "max_tokens": rng.randint(max_tokens // 2, max_tokens)})


def go_on(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        *messages,
        {"role": "assistant", "content": "I am happy to help with that. Could you tell me a little more?"},
        {"role": "user", "content": "It is about the one from last spring; what do you suggest?"},
    ]
