"""The invoice extractor's data: a message in, name, ISO date and amount as compact JSON out. Knows no models."""

from __future__ import annotations

import datetime as dt
import json
import random
from decimal import Decimal, InvalidOperation

from demo_data.job import Example, pick

_TRAIN = (
    "Hi, please pay {name} {amount} by {date}.",
    "Invoice from {name}: {amount}, due on {date}.",
    "{name} sent us a bill over {amount}. It is dated {date}.",
    "On {date} we received an invoice of {amount} from {name}.",
    "Please transfer {amount} to {name}. The due date is {date}.",
    "Dear accounting, the bill of {date} from {name} amounts to {amount}.",
    "Payee: {name}\nDate: {date}\nTotal: {amount}",
    "Total {amount}\nIssued {date}\nIssued by {name}",
    "Can you check whether we paid {name}? It was {amount} on {date}.",
    "{date}: paid {amount} to {name} for the office chairs.",
    "{name} fixed our heating on {date} and charges {amount}.",
    "We owe {name} {amount}; payment is expected on {date}.",
    "Reminder: your payment of {amount} to {name} was due on {date}.",
    "The catering on {date} cost {amount}, billed by {name}.",
    "Hello, I am {name}. My invoice of {date} over {amount} is still open.",
    "For the translation {name} asks {amount}, payable until {date}.",
    "Please book this: supplier {name}, amount {amount}, date {date}.",
    "Date of invoice {date}, sum {amount}, contact {name}.",
    "{amount} will be debited on {date} for {name}.",
    "Our designer {name} billed {amount} for the logo on {date}.",
    "Attached is the receipt of {date}. {name} paid {amount} in advance.",
    "Refund {amount} to {name}, who cancelled on {date}.",
    "Hello team, {name} invoiced us {amount} on {date}. Thanks!",
    "Order confirmed for {name} on {date}. Amount due: {amount}.",
)
_HELD_OUT = (
    "Good morning, could you settle the bill of {name}? The sum is {amount} and the deadline is {date}.",
    "{name} repaired the roof and wants {amount} no later than {date}.",
    "Customer: {name}\nAmount payable: {amount}\nPayable by: {date}",
    "An invoice dated {date} came in from {name}, the total is {amount}.",
    "Please note that {amount} for {name} must leave our account on {date}.",
    "I, {name}, request payment of {amount} until {date}.",
    "The photographer {name} sent a bill on {date}, it says {amount}.",
    "Bill received {date}. Sender is {name}. We have to pay {amount}.",
    "For the workshop held on {date}, {name} has billed us {amount}.",
    "Payment request: {amount} in favour of {name}, date {date}.",
    "Could someone pay {amount}? It goes to {name} and was due {date}.",
    "Our tenant {name} transferred {amount} for the flat on {date}.",
)

_TRAIN_FIRST = (
    "Anna", "Ben", "Carla", "David", "Elif", "Frank", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Laura", "Marco", "Nina", "Omar",
    "Paula", "Rene", "Sofia", "Tom", "Vera", "Walter", "Yara", "Zoe", "Igor", "Mei", "Amir", "Lucia", "Piotr", "Hannah", "Diego",
    "Fatima", "George", "Helen", "Ivan", "Julia", "Kofi", "Linda", "Mohamed", "Nora", "Oliver",
)  # fmt: skip
_TRAIN_LAST = (
    "Adams", "Becker", "Costa", "Dubois", "Eriksen", "Fischer", "Garcia", "Hansen", "Ivanova", "Jansen", "Keller", "Lopez",
    "Moreau", "Novak", "Okafor", "Petrov", "Rossi", "Schmidt", "Tanaka", "Vargas", "Weber", "Yilmaz", "Zhang", "Brown", "Clark",
    "Dixon", "Evans", "Foster", "Greene", "Hughes", "Khan", "Lindqvist", "Mendes", "Nguyen", "Osei", "Pham", "Quinn", "Ramos",
    "Silva", "Turner",
)  # fmt: skip
_HELD_OUT_FIRST = (
    "Mirela",
    "Oskar",
    "Priya",
    "Quentin",
    "Rosa",
    "Stefan",
    "Tamara",
    "Ulrich",
    "Viola",
    "Xavier",
    "Bianca",
    "Edgar",
)
_HELD_OUT_LAST = (
    "Abbott", "Berger", "Castillo", "Donovan", "Engel", "Ferrari", "Gupta", "Horvath", "Iqbal", "Johansson", "Kowalski", "Lambert",
)  # fmt: skip

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip


def _written_date(rng: random.Random, day: dt.date) -> str:
    month = _MONTHS[day.month - 1]
    return pick(
        rng,
        (f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}", f"{day.day} {month[:3]} {day.year}", day.isoformat()),
    )


def _written_amount(rng: random.Random, cents: int) -> str:
    plain, grouped = f"{cents / 100:.2f}", f"{cents / 100:,.2f}"
    return pick(rng, (f"${plain}", f"${grouped}", f"EUR {plain}", f"{grouped} euros", f"USD {grouped}", f"£{plain}"))


def _make(rng: random.Random, template: str, first: tuple[str, ...], last: tuple[str, ...], years: range) -> Example:
    name = f"{pick(rng, first)} {pick(rng, last)}"
    day = dt.date(rng.choice(years), 1, 1) + dt.timedelta(days=rng.randrange(365))
    cents = rng.randrange(500, 10 ** rng.randrange(4, 8))
    user = template.format(name=name, date=_written_date(rng, day), amount=_written_amount(rng, cents))
    answer = {"name": name, "date": day.isoformat(), "amount": f"{cents / 100:.2f}"}
    return Example(user, json.dumps(answer, separators=(",", ":"), ensure_ascii=False))


def _as_amount(value: object) -> Decimal | None:
    try:
        return Decimal(str(value))
    except InvalidOperation:
        return None


class InvoiceExtractor:
    """Turns a message about an invoice into ``{"name":…,"date":…,"amount":…}``."""

    name = "invoice-extractor"
    instruction = (
        "Extract name, date and amount as one line of JSON and write nothing else: "
        '{"name":"...","date":"YYYY-MM-DD","amount":"0.00"}'
    )
    rule = "the answer is a JSON object whose three fields are all right"
    max_tokens = 52

    def draw(self, rng: random.Random) -> Example:
        """Draw a template, a name, a date of 2021 to 2026 and an amount."""
        return _make(rng, pick(rng, _TRAIN), _TRAIN_FIRST, _TRAIN_LAST, range(2021, 2027))

    def held_out(self) -> list[Example]:
        """Five messages from each template, with new names and the years 2027 and 2028."""
        rng = random.Random(30_003)
        return [
            _make(rng, template, _HELD_OUT_FIRST, _HELD_OUT_LAST, range(2027, 2029)) for template in _HELD_OUT for _ in range(5)
        ]

    def is_success(self, example: Example, output: str) -> bool:
        """All three fields right; the amount may be written as a number or a string."""
        try:
            got = json.loads(output)
        except ValueError:
            return False
        want = json.loads(example.answer)
        if not isinstance(got, dict) or got.keys() != want.keys():
            return False
        return bool(
            got["name"] == want["name"] and got["date"] == want["date"] and _as_amount(got["amount"]) == Decimal(want["amount"])
        )
