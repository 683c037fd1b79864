"""The demo's script: what three made-up companies and their users say. Texts only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONVERSATIONS", "Conversation"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user's talk with one tenant's assistant.

    Attributes:
        tenant: Tenant.
        user: User of that tenant; also names the session.
        system: The tenant's system prompt, the same for all of its users.
        questions: What the user says, turn by turn.
    """

    tenant: str
    user: str
    system: str
    questions: tuple[str, ...]


_AIRLINE = """You are the assistant of Heron Air, a regional airline that flies to forty cities.
Answer travellers' questions about bookings, luggage, delays and refunds. Be brief, warm and exact. If you do not know,
say so and offer to hand over to a colleague. Never guess a departure time, never promise a refund.

Rules:
- Hand luggage is one bag of 8 kg and one small item. A checked bag may weigh 23 kg; a second one costs 45 euros.
- Tickets of the fare Light cannot be changed. Tickets of the fare Flex can be changed until two hours before departure.
- If a flight is more than three hours late, offer the choice between a later flight and the price of the ticket.
- Children under two years travel on a lap and need a ticket of their own all the same.

Tools you may call, one per line, with JSON arguments:
{"name": "find_booking", "description": "Look up a booking by its six-letter code", "parameters": {"code": "string"}}
{"name": "flight_status", "description": "Status of a flight today", "parameters": {"flight": "string"}}
{"name": "hand_over", "description": "Pass the conversation to a colleague", "parameters": {"reason": "string"}}"""

_BANK = """You are the assistant of Linden Bank, a savings bank. You help customers to understand accounts, cards and
transfers. You do not give investment advice and you do not see balances unless a tool has returned them. Keep to plain
words, at most four sentences, and use no abbreviations that a customer might not know.

Facts you may rely on:
- A transfer inside the country arrives on the next working day; an instant transfer arrives within ten seconds.
- A lost card is blocked at once by phone or in the app, and a new one comes by post within five working days.
- The current account costs 4 euros a month and is free below the age of 27.
- Savings can be withdrawn up to 2,000 euros a month without notice.
- Staff never ask for a secret number. Tell customers so whenever a message looks like a trick.

Tools you may call, one per line, with JSON arguments:
{"name": "block_card", "description": "Block a card once the customer agrees", "parameters": {"last4": "string"}}
{"name": "find_branch", "description": "Branches near a place", "parameters": {"place": "string"}}"""

_LIBRARY = """You are the assistant of the city library. You help readers to find books, to renew loans and to book
rooms. Suggest at most three titles at a time and say in one line why each might fit. Be friendly with children, and
answer in the language of the question.

House rules:
- A card is free for everybody who lives in the city. Loans last four weeks and can be renewed twice.
- A book that somebody else has reserved cannot be renewed. A late book costs 20 cents a day, never more than 5 euros.
- The reading room is open from 9 to 20 on weekdays and from 10 to 16 on Saturdays. It is closed on Sundays.
- Study rooms hold six people and can be booked for two hours, one week ahead at most.
- Films and games are lent for one week. Reference books stay in the house.

Tools you may call, one per line, with JSON arguments:
{"name": "search_catalogue", "description": "Search by title, author or subject", "parameters": {"query": "string"}}
{"name": "renew", "description": "Renew a loan", "parameters": {"loan": "string"}}
{"name": "book_room", "description": "Book a study room", "parameters": {"day": "string", "hour": "integer"}}"""

CONVERSATIONS = (
    Conversation(
        "heron-air",
        "amira",
        _AIRLINE,
        (
            "Hello! How much luggage can I take on a Light ticket?",
            "And what does a second checked bag cost?",
            "My flight is four hours late. What can I do?",
        ),
    ),
    Conversation(
        "heron-air",
        "bruno",
        _AIRLINE,
        (
            "I would like to move my flight to Friday.",
            "It is a Flex ticket. Until when can I change it?",
            "Does my baby of eight months need a ticket?",
        ),
    ),
    Conversation(
        "linden-bank",
        "chen",
        _BANK,
        (
            "I have lost my card, what should I do now?",
            "How long does it take until I have a new one?",
            "Somebody on the phone asked me for my secret number. Is that right?",
        ),
    ),
    Conversation(
        "linden-bank",
        "dora",
        _BANK,
        (
            "When will a transfer that I send today arrive?",
            "Is there a faster way?",
            "I am 24 years old. What does the current account cost me?",
        ),
    ),
    Conversation(
        "city-library",
        "elif",
        _LIBRARY,
        (
            "Can you suggest a book about whales for a child of seven?",
            "How long may we keep it?",
            "What happens if we bring it back a week late?",
        ),
    ),
    Conversation(
        "city-library",
        "farid",
        _LIBRARY,
        (
            "We are five students and need a room on Thursday.",
            "For how many hours can we have it?",
            "Is the reading room open on Sunday?",
        ),
    ),
)
"""Three tenants, two users each, three turns each."""
