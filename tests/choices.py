"""Options that the tests of multiple choice share."""

COLORS = ["red", "blue", "green", "yellow"]
LABELLED = ["A. red", "B. blue", "C. green", "D. yellow"]
BRACKETED = ["(A) red", "(B) blue", "(C) green", "(D) yellow"]
NUMBERED = ["1. red", "2. blue", "3. green", "4. yellow"]
DECIMALS = ["1.5", "2.5", "3.5", "4.5"]
ANGLES = ["30", "45", "60", "90"]
SIX = ["one", "two", "three", "four", "five", "six"]
