"""The brand voice's data: a customer's question in, an answer in a fixed house style out. Knows no models."""

from __future__ import annotations

import random
import re

from demo_data.job import Example, pick

_GREETING = "Howdy from Acme!"
_SIGN_OFF = "Stay curious, your Acme crew (ref {reference})"

# (question, answer): the sentence in the middle names the product and says what happens next.
_TRAIN = (
    ("When will my {product} arrive?", "Your {product} is on its way and a tracking link follows by e-mail."),
    ("My {product} is broken.", "We are sorry about your {product} and will send a replacement at once."),
    ("Can I return the {product}?", "You can return the {product} within thirty days and we cover the postage."),
    ("How do I switch on the {product}?", "Hold the main button of the {product} for three seconds and it starts."),
    ("Is the {product} waterproof?", "Our team will check the data sheet of the {product} and write back today."),
    ("I was charged twice for the {product}.", "We will look into both charges for the {product} and refund any extra one."),
    ("Do you have the {product} in blue?", "We will look up every colour of the {product} and let you know today."),
    ("What is the warranty on the {product}?", "The {product} comes with a warranty of two years from the day of purchase."),
    ("Please cancel my order of the {product}.", "Your order of the {product} is cancelled and the money is on its way back."),
    ("The app does not find my {product}.", "Restart the {product} beside your phone and the app will find it."),
    ("Where can I get spare parts for the {product}?", "Spare parts for the {product} are in our online shop under service."),
    ("Does the {product} work in Europe?", "The {product} works everywhere with the adapter that lies in the box."),
    ("I love the {product}, thank you!", "It makes our day that you enjoy the {product} so much."),
    ("How do I clean the {product}?", "Wipe the {product} with a soft damp cloth and let it dry."),
    ("The {product} came without a manual.", "We have just sent the manual of the {product} to your inbox."),
    ("Can I change the address for the {product}?", "Send us the new address for the {product} and we will update it."),
    ("Is there a discount on the {product}?", "Join our newsletter and the next {product} is ten percent cheaper."),
    ("The {product} makes a strange noise.", "Please stop using the {product} for now and we will call you today."),
)
_TRAIN_FRAMES = (
    "Ticket {reference}: {question}",
    "{question} (ticket {reference})",
    "Hello, my ticket is {reference}. {question}",
    "{question} My ticket number is {reference}.",
    "Re: {reference}. {question} Thanks!",
    "Hi there! {question} You gave me the reference {reference}.",
    "[{reference}] {question}",
    "This is about {reference}. {question} Please help.",
)
_HELD_OUT = (
    "How long does delivery of the {product} take?",
    "Why is my {product} so slow?",
    "I lost the charger of my {product}, what now?",
    "Could I swap my {product} for a larger one?",
    "The screen of the {product} stays dark.",
    "May my child use the {product} alone?",
    "Do you offer gift wrapping for the {product}?",
    "The invoice for the {product} has the wrong name on it.",
    "Which batteries does the {product} need?",
    "Someone stole my {product} last night.",
)
_HELD_OUT_FRAMES = (
    "Good evening. {question} The case is {reference}.",
    "Case {reference} again! {question}",
    "{question} Please quote {reference} in your answer.",
    "I wrote to you before under {reference} and still wonder: {question}",
    "Regarding {reference}, {question}",
    "Dear team, {question} Sent from my phone. Reference: {reference}",
)
_TRAIN_PRODUCTS = (
    "Orbit headset", "Atlas lamp", "Comet kettle", "Nimbus backpack", "Vega keyboard", "Solo blender", "Marlin watch",
    "Pico camera", "Delta drill", "Luna mattress", "Echo doorbell", "Terra mower", "Bolt scooter", "Mesa chair",
    "Rio coffee maker", "Zen humidifier",
)  # fmt: skip
_HELD_OUT_PRODUCTS = ("Juno speaker", "Kestrel jacket", "Tundra tent", "Fable reader", "Onyx toaster", "Sierra bike")


def _reference(rng: random.Random, prefixes: tuple[str, ...]) -> str:
    return f"{pick(rng, prefixes)}-{rng.randrange(10_000, 100_000)}"


class BrandVoice:
    """Answers a customer in Acme's house style: fixed greeting, one sentence, fixed sign-off with the ticket's reference."""

    name = "brand-voice"
    instruction = (
        "You answer customers of Acme. Write exactly three lines. First line: "
        f'"{_GREETING}" Second line: one sentence that names the product. '
        f'Third line: "{_SIGN_OFF.format(reference="REFERENCE")}", with the customer\'s ticket reference in place of REFERENCE.'
    )
    rule = "three lines: the greeting, one sentence that names the product, the sign-off with the customer's reference"
    max_tokens = 60

    def draw(self, rng: random.Random) -> Example:
        """Draw a question with its answer, a frame, a product and a reference."""
        question, sentence = _TRAIN[rng.randrange(len(_TRAIN))]
        product, reference = pick(rng, _TRAIN_PRODUCTS), _reference(rng, ("AC", "TK", "CS", "RQ", "SR", "HD"))
        user = pick(rng, _TRAIN_FRAMES).format(reference=reference, question=question.format(product=product))
        return Example(user, "\n".join((_GREETING, sentence.format(product=product), _SIGN_OFF.format(reference=reference))))

    def held_out(self) -> list[Example]:
        """Each question in each frame; the answer kept here is the product and the reference the output must carry."""
        rng = random.Random(40_004)
        examples = []
        for question in _HELD_OUT:
            for frame in _HELD_OUT_FRAMES:
                product, reference = pick(rng, _HELD_OUT_PRODUCTS), _reference(rng, ("QX", "BN", "MP"))
                user = frame.format(reference=reference, question=question.format(product=product))
                examples.append(Example(user, f"{product}\n{reference}"))
        return examples

    def is_success(self, example: Example, output: str) -> bool:
        """Three lines; the middle one is one sentence that names the product; the outer two are as the style has them."""
        product, reference = example.answer.split("\n")
        lines = [line.strip() for line in output.strip().split("\n")]
        if len(lines) != 3 or lines[0] != _GREETING or lines[2] != _SIGN_OFF.format(reference=reference):
            return False
        is_one_sentence = re.fullmatch(r"[^.!?]+[.!?]", lines[1]) is not None and len(lines[1].split()) >= 5
        return is_one_sentence and product.casefold() in lines[1].casefold()
