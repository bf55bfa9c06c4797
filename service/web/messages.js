// Messages of the service about photos, in words for people who do not use its API; others are shown as they are.

const FORMATS = "JPEG, PNG, WebP, AVIF or TIFF";
const CHOOSE = "Choose another photo.";
const MESSAGES = {
  "image-unsupported": {
    title: "This file cannot be read as a photo", remedy: `Choose a photo that is saved as ${FORMATS}.`,
  },
  "image-empty": { title: "This file is empty", detail: "This file has no content.", remedy: CHOOSE },
  "image-unreadable": {
    title: "This photo is damaged", detail: "This photo cannot be opened.",
    remedy: "Save it again, or choose another one.",
  },
  "image-truncated": {
    title: "This photo is incomplete", detail: "A part of this photo is missing.",
    remedy: "Download or copy it again, then try once more.",
  },
  "image-too-large": { title: "The photo is too large", remedy: "Choose a smaller one." },
  "image-too-many-pixels": { title: "The photo is too large", remedy: "Choose a smaller one." },
  "body-too-large": { title: "The photo is too large", remedy: "Choose a smaller one." },
};

/** Returns a problem of the service with the words of this page. */
export const rephrase = (problem) => ({ ...problem, ...MESSAGES[(problem.type ?? "").replace("/problems/", "")] });
