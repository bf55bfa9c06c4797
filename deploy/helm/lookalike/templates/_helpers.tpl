{{/* The name of every object: the release, so that two releases fit into one namespace. */}}
{{- define "lookalike.name" -}}
{{- contains "lookalike" .Release.Name | ternary .Release.Name (printf "%s-lookalike" .Release.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "lookalike.selector" -}}
app.kubernetes.io/name: lookalike
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lookalike.labels" -}}
{{ include "lookalike.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "lookalike.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The address of the gallery: a folder, a URL, or two URLs. It holds no secret. */}}
{{- define "lookalike.gallery" -}}
{{- if eq .Values.mode "embedded" -}}
/data/gallery
{{- else -}}
{{- with .Values.postgres -}}
postgresql://{{ .user }}@{{ .host }}:{{ .port }}/{{ .database }}?schema={{ .schema }}
{{- end }}
{{- if eq .Values.mode "cluster" }}
{{- with .Values.qdrant }} qdrant://{{ join "," .nodes }}/{{ .prefix }}{{ with .options }}?{{ . }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* How to reach PostgreSQL and Qdrant; the secrets come from Secrets that you create. */}}
{{- define "lookalike.connection" -}}
- name: LOOKALIKE_GALLERY
  value: {{ include "lookalike.gallery" . | quote }}
{{- if ne .Values.mode "embedded" }}
- name: PGPASSWORD
  valueFrom: { secretKeyRef: { name: {{ .Values.postgres.passwordSecret.name }}, key: {{ .Values.postgres.passwordSecret.key }} } }
- name: PGSSLMODE
  value: {{ .Values.postgres.sslMode }}
{{- if .Values.postgres.caSecret.name }}
- name: PGSSLROOTCERT
  value: /postgres-ca/ca.crt
{{- else if eq .Values.postgres.sslMode "verify-full" }}
- name: PGSSLROOTCERT
  value: system
{{- end }}
{{- if and (eq .Values.mode "cluster") .Values.qdrant.apiKeySecret.name }}
- name: LOOKALIKE_QDRANT_API_KEY
  valueFrom: { secretKeyRef: { name: {{ .Values.qdrant.apiKeySecret.name }}, key: {{ .Values.qdrant.apiKeySecret.key }} } }
{{- end }}
{{- end }}
{{- end }}

{{- define "lookalike.hasCa" -}}
{{- if and (ne .Values.mode "embedded") .Values.postgres.caSecret.name }}yes{{ end }}
{{- end }}

{{- define "lookalike.caVolume" -}}
- name: postgres-ca
  secret:
    secretName: {{ .Values.postgres.caSecret.name }}
    items: [{ key: {{ .Values.postgres.caSecret.key }}, path: ca.crt }]
{{- end }}

{{- define "lookalike.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "lookalike.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* The claim of the volume at /data: of the service in the mode embedded, of the job in the others. */}}
{{- define "lookalike.claim" -}}
{{- if eq .Values.mode "embedded" -}}
{{ .Values.persistence.existingClaim | default (printf "%s-data" (include "lookalike.name" .)) }}
{{- else -}}
{{ .Values.reindex.persistence.existingClaim | default (printf "%s-reindex" (include "lookalike.name" .)) }}
{{- end }}
{{- end }}

{{- define "lookalike.dns" -}}
- to:
    - namespaceSelector: { matchLabels: { kubernetes.io/metadata.name: kube-system } }
      podSelector: { matchLabels: { k8s-app: kube-dns } }
    - ipBlock: { cidr: 169.254.20.10/32 } # the cache of NodeLocal DNS, where a cluster has one
  ports: [{ port: 53, protocol: UDP }, { port: 53, protocol: TCP }]
{{- end }}

{{/* Outgoing connections to PostgreSQL and Qdrant; 6333, the port of REST, stands for 6334, that of gRPC. */}}
{{- define "lookalike.storeEgress" -}}
- to: {{- toYaml .Values.networkPolicy.postgresTo | nindent 4 }}
  ports: [{ port: {{ .Values.postgres.port }}, protocol: TCP }]
{{- if eq .Values.mode "cluster" }}
{{- $ports := list }}
{{- range .Values.qdrant.nodes }}{{ $ports = append $ports (splitList ":" . | last | replace "6333" "6334") }}{{ end }}
- to: {{- toYaml .Values.networkPolicy.qdrantTo | nindent 4 }}
  ports:
    {{- range uniq $ports }}
    - { port: {{ . }}, protocol: TCP }
    {{- end }}
{{- end }}
{{- end }}
