"""Clauses of GenEval prompts."""

DOG = [{"class": "dog", "count": 1}]
RED_DOG = [{"class": "dog", "count": 1, "color": "red"}]
LEFT = [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["left of", 0]}]
