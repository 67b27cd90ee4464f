"""The limits of searching: how long plans are tried, what that may cost, and when a plan is chosen or given up.

``tests/tune/test_director.py`` and ``tests/tune/test_random_fits.py`` check them in simulated fits. Numbers without a
named measurement are judgements, and their texts say what is weighed against what.
"""

# Limits of one search, in which the candidates and the user's plan alternate; see `Search`.

MAX_STEPS = 49
"""Maximum number of steps of a search, over all plans. Together with the 11 steps before it a fit searches for 60, as
docs/explanation/auto.md says. With more, smaller gains would be found, but a slow plan would be kept for longer."""

MAX_ARMS = 3
"""Maximum number of candidates. Each must be visited twice, in six steps or more, with the user's plan in between,
within `MAX_STEPS`."""

MIN_GAIN = 0.02
"""A plan must save this share of a step to be chosen. Less is rarely beyond the noise of so few steps, and is not worth
another plan."""

NUM_TIMED_STEPS = 4
"""Number of steps that a visit times: their median ignores a disturbed one, and there can be several visits."""

NUM_TRIES = 3
"""How often steps of a visit are timed at most if half of them or more do not count, because of validations or of other
batch sizes."""

UNKNOWN_SLOWDOWN = 1.5
"""Assumed step time of a candidate without a prediction, as a multiple of the user's, when the cost of its visit is
compared with the budget. A slower one would be given up at once (`MAX_SLOWDOWN`)."""

UNKNOWN_CHANGE = 1.0
"""Assumed cost of a change of plan in steps, and again of the first step after it, until a change was timed."""

MAX_SLOWDOWN = 1.5
"""A visit ends at once if its steps take more than this multiple of the user's. Such a candidate cannot win, and every
step of it costs half a step of the budget."""

# Limits for the fit around searches: what is observed before, and the watch after a choice; see `Director`.

NUM_START_STEPS, NUM_FIRST_STEPS = 3, 2
"""The first `NUM_START_STEPS` steps of a fit do not count, because memory is allocated and kernels are loaded in them.
The next `NUM_FIRST_STEPS` show how long a step takes, and so whether the fit is long enough for a search."""

MIN_CHANGE_STEPS = 2.0
"""Assumed cost of a change of plan, in steps, before the first one was timed: one step to wrap the model again, and one
by which the first step after it may be longer."""

MIN_CHANGES = 2
"""Minimum number of changes of plan: observing the user's plan takes two, to it and back, and a search takes at least
two for each candidate."""

LOSSY_HANDICAP = 0.02
"""Share of a step that a lossy plan must save beyond a lossless one. It is a judgement: the price of gradients that are
not exact, which step times do not show."""

PROBATION_STEPS = 20
"""Number of steps with the chosen plan before the first look at it: enough for blocks of four steps, and few in case
the choice was wrong."""

NUM_ON_PROBATION = 3
"""Number of first looks at which a plan is rolled back if it is not faster than the user's. They are over after 220
steps; later the machine may have become slower for every plan."""

DRIFT = 0.15
"""Share by which the step time must change before another search. It is a judgement: a smaller change rarely alters the
order of plans by the 2 % that a search requires, and step times of shared machines vary by some percent."""

NUM_NOISES = 5.0
"""Number of standard errors of a look by which the step time must also change, in two looks in a row, because a fit has
thousands of looks."""

FIRST_SHARE, ALL_SHARE = 0.6, 0.7
"""Shares of the budget that a first search, and all searches together, may cost. The rest is a reserve, because the
cost of a visit is known only when it is over."""

MEASURING_SHARE = 0.35
"""Share of the budget that measuring compressors may take. It is a part of `FIRST_SHARE`, of which 0.25 remain for the
first search itself."""

CREDIT = 0.5
"""Share of the time saved by a plan that pays for further searches; the user keeps the rest."""

CHECK_SHARE = 0.005
"""Share of the time that checking whether the chosen plan is still the best may cost. It is a judgement: half of
`max_regret`, because such a search usually changes nothing."""
