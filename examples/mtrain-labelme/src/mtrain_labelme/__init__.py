"""Annotations of LabelMe (https://github.com/wkentaro/labelme) as a data set of mtrain."""
