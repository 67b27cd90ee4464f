"""The limits of searching: how long plans are tried, what that may cost, and when one is chosen or left.

``tests/tune/test_director.py`` and ``tests/tune/test_random_fits.py`` hold simulated fits to what these promise. Where
no measurement is named a number is a judgement, and its text says what it weighs against what.
"""

# A search, see `Search`: the candidates and the user's plan take turns.

MAX_STEPS = 49
"""The most steps of a search, over all plans: with the 11 before it, a fit searches for 60, which
docs/explanation/auto.md states. More would find smaller gains, and keep a slow plan for longer."""

MAX_ARMS = 3
"""The most candidates that take part. Each must be visited twice, in six steps or more, with the user's plan in
between, within `MAX_STEPS`."""

MIN_GAIN = 0.02
"""A plan must save this share of a step to be chosen. Less is rarely beyond the noise of so few steps, and is not worth
another plan."""

NUM_TIMED_STEPS = 4
"""Steps that a visit times: their median ignores one that is disturbed, and visits stay short enough for several."""

NUM_TRIES = 3
"""How often a visit is tried in which no step counts, because each had a validation or another batch size."""

UNKNOWN_SLOWDOWN = 1.5
"""Assumed step time of a candidate without a prediction, as a multiple of the user's, when its visit is weighed against
the budget. A slower one would be left at once (`MAX_SLOWDOWN`)."""

UNKNOWN_CHANGE = 1.0
"""Assumed cost of a change of plan in steps, and again of the first step after it, until a change was timed."""

MAX_SLOWDOWN = 1.5
"""A visit ends at once if its steps take more than this multiple of the user's. Such a candidate cannot win, and every
step of it costs half a step of the budget."""

# The fit around it, see `Director`: what is observed before, and the watch after a choice.

NUM_START_STEPS, NUM_FIRST_STEPS = 3, 2
"""The first steps of a fit do not count, as memory is allocated and kernels are loaded in them; the next ones show how
long a step is, and so whether the fit is long enough for a search."""

MIN_CHANGE_STEPS = 2.0
"""Assumed cost of a change of plan in steps before the first one: a step to wrap the model again, and one by which the
first step after it may be longer."""

MIN_CHANGES = 2
"""Observing the user's plan takes two changes of plan, to it and back; a search takes two for each candidate at
least."""

LOSSY_HANDICAP = 0.02
"""A lossy plan must save this share of a step beyond a lossless one. A judgement: the price of gradients that are not
exact, which no step time shows."""

PROBATION_STEPS = 20
"""Steps with the chosen plan before the first look at it: enough for blocks of four steps, and few if the choice was
wrong."""

NUM_ON_PROBATION = 3
"""First looks at which a plan is rolled back if it is not faster than the user's; they are over after 220 steps. Later
the machine may have become slower for every plan."""

DRIFT = 0.15
"""Share by which the step time must change before another plan is searched for. A judgement: a smaller change rarely
alters the order of plans by the 2 % that a search asks for, and step times of shared machines wander by some
percent."""

NUM_NOISES = 5.0
"""Standard errors of a look by which it must also change, twice in a row: a fit has thousands of looks."""

FIRST_SHARE, ALL_SHARE = 0.6, 0.7
"""A first search may cost this share of the budget, and all searches together this one. The rest is for bad luck, as
the cost of a visit is only known when it is over."""

MEASURING_SHARE = 0.35
"""Measuring compressors may take this share of the budget. It is a part of `FIRST_SHARE`, of which it leaves 0.25 to
the first search itself."""

CREDIT = 0.5
"""This part of what a plan has saved pays for further searches; the user keeps the rest."""

CHECK_SHARE = 0.005
"""Looking whether the chosen plan is still the best may cost this share of the time. A judgement: half of `max_regret`,
as such a search usually changes nothing."""
