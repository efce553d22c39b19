"""Prompts for experiments and lessons: plain questions of several lengths, some behind one long shared beginning.

Owns: the texts. Knows nothing about: models, tokenizers.
"""

from __future__ import annotations

_QUESTIONS = (
    "What is the capital of Norway?",
    "Name three fruits that grow on trees.",
    "Explain in one sentence what a queue is.",
    "Write a short poem about a lighthouse in winter.",
    "How many minutes are there in a week?",
    "Translate 'good morning' into French, Spanish and Italian.",
    "Why does bread rise when it is baked?",
    "Describe the colour blue to someone who has never seen it.",
    "What happens to water when it freezes?",
    "Give me a recipe for pancakes for four people.",
    "Who invented the printing press, and roughly when?",
    "List the planets of the solar system in order of their distance from the sun.",
    "What is the difference between a list and a tuple in Python?",
    "Tell a very short story about a dog that learns to open doors.",
    "How does a bicycle stay upright while it moves?",
    "What should I pack for a weekend in the mountains?",
    "Write a polite message to a neighbour who plays music late at night.",
    "What is seventeen times six?",
    "Explain photosynthesis to a child of ten.",
    "Name a mammal that lays eggs.",
    "Suggest a name for a small grey cat and say why it fits.",
    "What are the main parts of a computer and what does each of them do?",
    "How can I tell whether an egg is still fresh?",
    "Write two sentences about the sea, one sad and one cheerful.",
)
_HANDBOOK = (
    "You work at the front desk of a small museum by the harbour. The museum opens at ten in the morning and "
    "closes at six in the evening; on Mondays it stays closed. A ticket costs eight euros, children under twelve "
    "enter free, and groups of ten or more pay six euros each. The ground floor shows ships and nautical "
    "instruments, the first floor shows maps and paintings of the coast, and the tower has a view over the whole "
    "bay. Large bags must be left in the lockers beside the entrance, photographs are allowed without flash, and "
    "the cafe serves soup, sandwiches and tea. "
)
_DESK_QUESTIONS = (
    "A visitor asks: when do you open tomorrow, which is a Monday?",
    "A visitor asks: how much is it for two adults and a child of nine?",
    "A visitor asks: may I take pictures of the paintings?",
    "A visitor asks: where can I see the old maps?",
    "A visitor asks: what can I eat here?",
    "A teacher asks: what do we pay for twenty-four pupils of fifteen?",
    "A visitor asks: where do I put my suitcase?",
    "A visitor asks: is the tower worth the climb?",
)

PROMPTS: tuple[str, ...] = _QUESTIONS + tuple(_HANDBOOK + question for question in _DESK_QUESTIONS)
"""32 prompts; the last eight share a beginning of well over a hundred tokens."""
