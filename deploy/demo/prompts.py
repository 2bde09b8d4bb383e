"""What the demo asks: a chat, a completion, and a prompt of more than 1,000 tokens."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.request import Chat, ChatMessage, Input

_STORY = """\
The lighthouse at Marrow Point was built in the year of the great frost, when the harbour froze from shore to shore \
and the fishermen walked to their boats with lanterns in their hands. Before that winter nobody had thought that the \
point needed a light. The rocks were known to everyone who sailed there, and strangers had no reason to come. But the \
frost drove three merchant ships off their course, and two of them broke on the reef in one night. In the spring the \
town council met in the church, because the town hall had lost its roof, and decided to build a tower.

The money came slowly. The baker gave a tenth of what he earned, the rope makers gave the ropes, and the widow Aldane, \
who owned the only quarry within a day's ride, gave the stone on the condition that her name should never be carved \
on it. The mason who was hired for the work had built bridges all his life and had never seen the sea. He said that a \
tower was only a bridge that had changed its mind and gone straight up. He drew the plans on the back of a sail, and \
when the sail was needed again he drew them once more from memory on the wall of the inn, where parts of them can \
still be seen behind the clock.

It took four summers. In the first they cut a road into the cliff, wide enough for one cart and one patient horse. In \
the second they laid the foundation, which is nine feet thick and filled with rubble and lime. In the third summer \
there was a quarrel about the stairs: the mason wanted them to turn to the left, the keeper who had already been \
chosen wanted them to turn to the right, because he had a stiff knee. They turn to the right. In the fourth summer \
the lamp arrived from the capital in eleven wooden boxes packed with straw, and with it a young engineer called Ilse \
Varn, who stayed for two weeks to put it together and in the end stayed for thirty years.

She was the one who began to keep the book. Every evening she wrote down the wind, the height of the waves, the ships \
that passed, and one thing that had been different from the day before. The book was meant for the harbour office, \
which wanted numbers, but the last column grew longer every year. On one evening it says that a whale slept near the \
reef until midnight. On another it says that the new boy from the mill had climbed all the stairs to ask whether the \
light could be seen from the moon, and that she had told him she would write to somebody and find out. There is a \
letter from an observatory pasted on the next page. It is short and kind, and the answer is no.

When the engine was installed, the council wanted to send the keeper away, since a machine could now turn the lens. \
Ilse Varn wrote a report of six pages. She listed every night of the past ten years on which a machine would have \
stopped: four times because of ice, twice because of gulls, once because the oil had been mixed with water by a \
dealer whom she named. She added what it had cost in each of these nights to have a person there, namely one pot of \
coffee and some sleep, and what it would have cost not to have one. The council read the report in silence and voted \
to keep both the machine and the keeper, and to change the dealer.

In her last winter she trained the boy from the mill, who was by then a man with grey in his beard. She taught him to \
listen to the gears, to smell whether the oil was old, and to look first at the sea and only then at the instruments. \
He asked her what had been the hardest part of the work. She thought about it for the whole evening, and when he had \
already forgotten the question she said that it was the nights on which nothing happened, because on those nights \
one had to believe that the light had been the reason. He wrote that sentence into the book, in the last column, \
under the wind and the waves and the number of the ships, and he has told it to every keeper since.

The man from the mill kept the light for twenty-six years. He never found out whether anybody on the moon could see \
it, but he did find the third ship of the great frost: a fisherman pulled its bell out of the water, green and \
without a scratch. It hangs now beside the door at the foot of the stairs, and everyone who comes in is asked to \
strike it once, so that the people upstairs know that there is company and put another cup on the table.

Today the tower has an electric lamp and a small antenna, and a ship's captain can see the reef on a screen long \
before the light comes into view. Even so the council renews the keeper's contract every year, and every year \
somebody asks whether it is necessary. Then the oldest of them takes the book from the shelf, opens it anywhere, and \
reads one line from the last column aloud. So far that has always settled the matter, and afterwards they go to the \
inn and look at the drawing behind the clock."""


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One stream of the demo."""

    label: str
    title: str
    input: Input


def demo_prompts() -> list[DemoPrompt]:
    """In the order in which they are shown."""
    question = "Why is the sky blue, and why is it red in the evening? Answer in a few sentences."
    beginning = "The three most important inventions in history are"
    task = "Who was Ilse Varn, and what did she do? Answer in a few sentences."
    return [
        DemoPrompt("chat", question, Chat((ChatMessage("user", question),))),
        DemoPrompt("completion", f"{beginning} …", beginning),
        DemoPrompt("long", f"(a story) {task}", Chat((ChatMessage("user", f"{_STORY}\n\n{task}"),))),
    ]
