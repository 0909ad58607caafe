"""The ticket router's data: a customer's message in, one of six labels out. Knows no models."""

from __future__ import annotations

import random

from demo_data.job import Example, pick

LABELS = ("billing", "login", "shipping", "returns", "bug", "cancellation")

_TRAIN: dict[str, tuple[str, ...]] = {
    "billing": (
        "I was charged twice for order {number}.",
        "The invoice for {product} shows the wrong amount.",
        "Why is there an extra fee of {money} on my card statement?",
        "Could you send me a receipt for last month's payment?",
        "My card was declined although there is enough money on it.",
        "We need our VAT number printed on invoice {number}.",
        "The discount code did not come off the price of {product}.",
        "You debited {money} and I don't know what for.",
        "How do I change the credit card you charge every month?",
        "The total on bill {number} does not match the quote.",
        "I paid by bank transfer but the invoice is still marked as unpaid.",
        "Our accounting department needs a corrected invoice for {product}.",
        "Which payment methods do you take for {product}?",
        "I never received the invoice for {number}.",
        "You took the yearly price instead of the monthly price.",
        "Please put our purchase order number on the next bill.",
        "I see a pending charge of {money} from you.",
        "Tax was added twice on invoice {number}.",
        "Can we pay for {product} in two instalments?",
        "I got a payment reminder for a bill I settled weeks ago.",
    ),
    "login": (
        "I forgot my password and the reset mail never comes.",
        "My account is locked after too many attempts.",
        "The code from the authenticator app is not accepted.",
        "I can't sign in to {product} any more.",
        "It says my user name does not exist.",
        "How do I reset my password for {product}?",
        "I have a new phone and lost my two-factor codes.",
        "The login page keeps telling me wrong password.",
        "My colleague {name} cannot get into her account.",
        "The single sign-on link sends me back to the start page.",
        "I changed my e-mail address and now I can't log in.",
        "The password reset link has expired.",
        "Signing in with Google does not work for {product}.",
        "I am locked out of {product} since this morning.",
        "Please unlock the account of {name}.",
        "I never got the verification e-mail for my new account.",
        "My session asks for a security code that I don't have.",
        "Which user name did I register with?",
        "I get access denied when I enter my password.",
        "The text message with the login code does not arrive.",
    ),
    "shipping": (
        "Where is my parcel {number}?",
        "The tracking for {product} has not moved for a week.",
        "When will order {number} be delivered?",
        "I entered the wrong street, can you send the parcel to another address?",
        "The courier says it was delivered but there is nothing here.",
        "How long does delivery to Norway take?",
        "Do you ship {product} abroad?",
        "My package is stuck at customs.",
        "Can I get {product} delivered on a Saturday?",
        "The tracking number {number} is unknown to the carrier.",
        "Only one of the two boxes of order {number} came.",
        "Has {product} left your warehouse yet?",
        "I need the parcel before Friday, is express delivery possible?",
        "The driver left my package at the wrong house.",
        "Please deliver order {number} to our office instead.",
        "My delivery was due on Monday and is still not here.",
        "What does it cost to send {product} to Canada?",
        "The carrier could not find our building.",
        "Can I pick up order {number} at a parcel shop?",
        "The status has been preparing shipment for ten days.",
    ),
    "returns": (
        "I want to send {product} back.",
        "{product} arrived with a crack, I would like a replacement.",
        "How do I return order {number}?",
        "The size does not fit, can I exchange it?",
        "You sent me the wrong colour of {product}.",
        "Please e-mail me a return label for {number}.",
        "What is the deadline for returning {product}?",
        "I changed my mind and want to give {product} back.",
        "The box contained a different item than I ordered.",
        "I sent {product} back two weeks ago, did you get it?",
        "Can I swap {product} for a bigger one?",
        "The item is faulty, I'd like to exchange it under warranty.",
        "Do I have to return {product} in its original packing?",
        "Who pays the postage when I send something back?",
        "{product} is scratched, please take it back.",
        "I'd like my money back for the broken item in order {number}.",
        "Where can I drop off my return?",
        "It was a gift and she already has one, can we return it?",
        "The return form does not list {product}.",
        "I received two of {product}, where shall I send the extra one?",
    ),
    "bug": (
        "{product} crashes every time I open the settings.",
        "The export button does nothing.",
        "I get error 500 when I save a report.",
        "The app freezes after the latest update.",
        "The search in {product} shows no results although there are some.",
        "Uploading a photo ends with an unknown error.",
        "The dashboard of {product} stays blank.",
        "Dates are shown in the wrong format since version 4.",
        "The page loads for ever in Firefox.",
        "{product} drains my battery within an hour.",
        "Notifications arrive three times.",
        "The chart shows negative numbers that can't be right.",
        "The PDF that {product} makes has empty pages.",
        "Sorting a column mixes up the rows.",
        "Copy and paste stopped working in {product}.",
        "The mobile app closes itself when I scroll.",
        "The sync between my laptop and phone is broken.",
        "There is a typo that breaks the import of CSV files.",
        "A red error message appears when I press send.",
        "{product} loses my changes when I switch tabs.",
    ),
    "cancellation": (
        "Please cancel my subscription to {product}.",
        "I want to end my plan at the end of the month.",
        "How do I cancel {product}?",
        "We are not going to renew our contract.",
        "Please close my account and delete my data.",
        "I no longer need {product}, stop the subscription.",
        "What is the notice period for {product}?",
        "I'd like to cancel before the trial ends.",
        "Terminate our contract number {number}, please.",
        "My company moves to another vendor, so we are leaving.",
        "Please stop the automatic renewal of {product}.",
        "I hereby give notice for my plan.",
        "Can I cancel my membership today?",
        "We want to quit {product} by the end of the year.",
        "Please confirm in writing that my subscription has ended.",
        "I don't use the service any more and would like to leave.",
        "Take {name} off the plan and cancel it.",
        "The cancel option is hidden, please end my subscription for me.",
        "Unsubscribe our team from {product} for good.",
        "How can I get out of the yearly contract?",
    ),
}

_HELD_OUT: dict[str, tuple[str, ...]] = {
    "billing": (
        "There are two payments of {money} on my bank statement for the same thing.",
        "Could somebody explain the surcharge on our latest invoice?",
        "The company name on the bill for {product} is misspelled.",
        "I need a copy of invoice {number} for my tax return.",
        "You billed us for five users but we only have three.",
        "Am I able to pay for {product} with a debit card?",
        "The price I was charged is higher than the one on your website.",
        "My card expired, where can I enter the new one for the monthly payment?",
        "The credit you promised is missing from this month's bill.",
        "I was invoiced in dollars but we pay in euros.",
    ),
    "login": (
        "{product} won't accept my password.",
        "I am not getting the e-mail to choose a new password.",
        "After three wrong tries it has locked me out.",
        "I lost the phone that has my authenticator app on it.",
        "{name} needs a new password for her account.",
        "It keeps asking for a six-digit code that never arrives.",
        "My user name is not recognised when I try to log in.",
        "Since we moved to single sign-on nobody in my team can get in.",
        "How can I recover my account, I can't remember the password?",
        "Every time I sign in I'm thrown back to the login screen.",
    ),
    "shipping": (
        "My order {number} still has not arrived.",
        "Can you tell me when {product} will get here?",
        "The tracking page says delivered, but I have no package.",
        "I am moving next week, please deliver to my new address.",
        "Is it possible to have {product} sent to Japan?",
        "How many days does standard delivery take?",
        "The parcel has been in the same depot since Tuesday.",
        "Part of my delivery {number} is missing.",
        "Which courier brings {product}?",
        "Customs holds my parcel and asks for papers.",
    ),
    "returns": (
        "{product} came broken and I want a new one.",
        "I would like to return {product} because it is too small.",
        "Can I still send back something I bought three weeks ago?",
        "I ordered blue and got green, can I exchange it?",
        "How do I get a label for sending {product} back?",
        "Please tell me the address for returns.",
        "Has my return of order {number} reached you?",
        "I don't like {product}, may I give it back?",
        "The zip is torn, I'd like to swap it for a good one.",
        "The wrong article was in the box, what do I do with it?",
    ),
    "bug": (
        "The app shuts down as soon as I tap on the calendar.",
        "I see an error message whenever I try to print from {product}.",
        "Since the update, {product} hangs on the start screen.",
        "The filter does not work, it always lists everything.",
        "{product} displays the wrong totals in the weekly chart.",
        "Nothing happens when I click on save.",
        "The import stops halfway with error code 42.",
        "Pictures are not shown in {product} on my tablet.",
        "The text overlaps the buttons in dark mode.",
        "Half of my notes disappear after the sync.",
    ),
    "cancellation": (
        "I wish to terminate my subscription.",
        "How can I stop {product} from renewing next year?",
        "We have decided to leave {product}, please end the contract.",
        "Cancel my membership with immediate effect.",
        "Please delete my account, I don't need it any longer.",
        "I'd like to give notice for our plan {number}.",
        "We do not want to continue with {product} after the trial.",
        "By which date must I cancel so that it does not extend?",
        "Our club is closing down, so please cancel everything.",
        "I am switching to a competitor, please end my plan.",
    ),
}

_TRAIN_OPENERS = (
    "", "", "Hi, ", "Hello, ", "Hello team, ", "Good morning. ", "Dear support, ", "Hi there! ", "Quick question: ",
    "I am a customer since 2019. ", "This is {name} from Springfield. ", "I hope you are well. ", "Hey, ", "Urgent! ",
)  # fmt: skip
_TRAIN_CLOSERS = (
    "", "", " Thanks!", " Thank you, {name}", " Best regards, {name}", " Please help.", " I need an answer today.", " Cheers",
    " It is the second time I write.", " Kind regards", " What can you do?", " Looking forward to your reply.",
)  # fmt: skip
_HELD_OUT_OPENERS = ("", "Good evening, ", "To whom it may concern: ", "My name is {name}. ", "Sorry to bother you. ")
_HELD_OUT_CLOSERS = ("", " Many thanks in advance.", " Yours, {name}", " I'd be glad of a quick answer.", " All the best")

_TRAIN_PRODUCTS = (
    "the Atlas desk lamp", "the Orbit headset", "Ledgerly Pro", "the Comet kettle", "Taskpine", "the Nimbus backpack",
    "Quillnote", "the Vega keyboard", "the Solo blender", "Fleetmap", "the Marlin watch", "Chatwell Business",
)  # fmt: skip
_HELD_OUT_PRODUCTS = ("the Juno speaker", "Papertrail Plus", "the Kestrel jacket", "Brightbox", "the Tundra tent")
_TRAIN_NAMES = ("Anna", "Ben", "Carla", "David", "Elif", "Frank", "Grace", "Hugo", "Ines", "Jonas", "Kim", "Laura")
_HELD_OUT_NAMES = ("Mirela", "Oskar", "Priya", "Quentin", "Rosa")


def _fill(rng: random.Random, text: str, products: tuple[str, ...], names: tuple[str, ...]) -> str:
    message = text.format(
        product=pick(rng, products),
        name=pick(rng, names),
        number=rng.randrange(10_000, 100_000),
        money=f"${rng.randrange(5, 300)}.{rng.randrange(100):02d}",
    )
    return message[0].upper() + message[1:]


class TicketRouter:
    """Routes a support ticket to one of `LABELS`."""

    name = "ticket-router"
    instruction = f"Which team handles this message? Answer with exactly one label and nothing else: {', '.join(LABELS)}."
    rule = "the answer is exactly the right label"
    max_tokens = 8

    def draw(self, rng: random.Random) -> Example:
        """Draw a label, then a problem, an opener and a closer."""
        label = pick(rng, LABELS)
        text = pick(rng, _TRAIN_OPENERS) + pick(rng, _TRAIN[label]) + pick(rng, _TRAIN_CLOSERS)
        return Example(_fill(rng, text, _TRAIN_PRODUCTS, _TRAIN_NAMES), label)

    def held_out(self) -> list[Example]:
        """Ten problems of each label."""
        rng = random.Random(20_002)
        return [
            Example(
                _fill(rng, pick(rng, _HELD_OUT_OPENERS) + text + pick(rng, _HELD_OUT_CLOSERS), _HELD_OUT_PRODUCTS, _HELD_OUT_NAMES),
                label,
            )
            for label in LABELS
            for text in _HELD_OUT[label]
        ]

    def is_success(self, example: Example, output: str) -> bool:
        """The label and nothing else, but for white space around it."""
        return output.strip() == example.answer
