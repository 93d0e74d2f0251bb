"""Augments images, and mixes batches: crop, resize, flip, color, normalize, cast, mix.

    transform = Compose([RandomResizedCrop(224), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.bfloat16)])
    loader = ShardLoader("out/", batch_size=256, transform=transform)

Random numbers depend only on (seed, epoch, sample, view): they are the same after a resume, on any number of ranks or
threads, on the CPU and on a GPU. (Mixup, CutMix and a RandomChoice of them depend on the batch as well.)

Consecutive crops, resizes and flips are one pass over the pixels. Masks go through the same crops, flips and warps as
their images. If a set was squashed to one shape (`shardio convert --fit squash`), crops are boxes of the
original image, and the result is undistorted.
"""

from shardio.augment.arguments import from_dict as from_dict
from shardio.augment.chain import Compose as Compose
from shardio.augment.chain import Transform as Transform
from shardio.augment.chain import Views as Views
from shardio.augment.choice import RandomApply as RandomApply
from shardio.augment.choice import RandomChoice as RandomChoice
from shardio.augment.choice import RandomOrder as RandomOrder
from shardio.augment.color import ColorJitter as ColorJitter
from shardio.augment.color import GaussianBlur as GaussianBlur
from shardio.augment.color import RandomAdjustSharpness as RandomAdjustSharpness
from shardio.augment.color import RandomAutocontrast as RandomAutocontrast
from shardio.augment.color import RandomEqualize as RandomEqualize
from shardio.augment.color import RandomGrayscale as RandomGrayscale
from shardio.augment.color import RandomInvert as RandomInvert
from shardio.augment.color import RandomPosterize as RandomPosterize
from shardio.augment.color import RandomSolarize as RandomSolarize
from shardio.augment.erasing import RandomErasing as RandomErasing
from shardio.augment.geometry import RandomAffine as RandomAffine
from shardio.augment.geometry import RandomPerspective as RandomPerspective
from shardio.augment.geometry import RandomRotation as RandomRotation
from shardio.augment.geometry import VerticalFlip as VerticalFlip
from shardio.augment.mix import CutMix as CutMix
from shardio.augment.mix import Mixup as Mixup
from shardio.augment.per_sample import PerSample as PerSample
from shardio.augment.policies import AutoAugment as AutoAugment
from shardio.augment.policies import RandAugment as RandAugment
from shardio.augment.policies import TimmRandAugment as TimmRandAugment
from shardio.augment.policies import TrivialAugmentWide as TrivialAugmentWide
from shardio.augment.recipes import RECIPE_REPEATS as RECIPE_REPEATS
from shardio.augment.recipes import recipe as recipe
from shardio.augment.transforms import AlternatingFlip as AlternatingFlip
from shardio.augment.transforms import CenterCrop as CenterCrop
from shardio.augment.transforms import HorizontalFlip as HorizontalFlip
from shardio.augment.transforms import Normalize as Normalize
from shardio.augment.transforms import Pad as Pad
from shardio.augment.transforms import RandomCrop as RandomCrop
from shardio.augment.transforms import RandomResizedCrop as RandomResizedCrop
from shardio.augment.transforms import Resize as Resize
from shardio.augment.transforms import ToDtype as ToDtype
